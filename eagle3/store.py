"""What stages make and share: artifacts named by signatures, finished by a manifest, made by one process at a time.

<store>/<stage>/<signature>/manifest.json   an artifact: immutable once the manifest is there
<store>/pools/<kind>/<signature>/           what grows: answers and states of every sample count, keyed by prompt or row
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3.errors import StoreError

SIGNATURE_LENGTH = 16


def signature(stage: str, version: int, settings: Mapping[str, Any], inputs: Mapping[str, str]) -> str:
    """Name of what `stage` makes: a hash over canonical JSON of its version, the settings that can change its result, and what it is made from."""
    return digest({"stage": stage, "version": version, "settings": settings, "inputs": inputs})


def digest(value: Any) -> str:
    """Hash of anything JSON can hold, the same in every process."""
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(canonical.encode()).hexdigest()[:SIGNATURE_LENGTH]


def file_digest(path: Path) -> str:
    """Hash of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:SIGNATURE_LENGTH]


@dataclass(frozen=True)
class Artifact:
    """What a finished stage left: `manifest` holds its settings, inputs, facts and what it cost."""

    stage: str
    signature: str
    path: Path
    manifest: dict[str, Any]

    @property
    def facts(self) -> dict[str, Any]:
        facts: dict[str, Any] = self.manifest["facts"]
        return facts


class Store:
    """Artifacts and pools under one root folder."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root).expanduser().absolute()
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.root):
                pass
        except OSError as error:
            raise StoreError(f"paths.store={root} can't be written ({error.strerror}): free space, change its permissions, or give another folder.") from None

    def folder(self, stage: str, sig: str) -> Path:
        return self.root / stage / sig

    def pool(self, kind: str, sig: str) -> Path:
        path = self.root / "pools" / kind / sig
        path.mkdir(parents=True, exist_ok=True)
        return path

    def find(self, stage: str, sig: str) -> Artifact | None:
        """The finished artifact, or None.

        Raises:
            StoreError: a manifest is there but can't be read.
        """
        path = self.folder(stage, sig)
        try:
            manifest = json.loads((path / "manifest.json").read_text())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise StoreError(f"{path / 'manifest.json'} is damaged ({error}): delete that folder, and the next run makes it again.") from None
        return Artifact(stage, sig, path, manifest)

    def finish(self, stage: str, sig: str, manifest: Mapping[str, Any]) -> Artifact:
        """Declare an artifact finished: its manifest appears in one rename, last of all."""
        write_json(self.folder(stage, sig) / "manifest.json", {"stage": stage, "signature": sig, **manifest})
        artifact = self.find(stage, sig)
        assert artifact is not None
        return artifact

    def reopen(self, artifact: Artifact) -> None:
        """Make a finished artifact unfinished, before anything in its folder changes."""
        (artifact.path / "manifest.json").unlink()

    @contextlib.contextmanager
    def lock(self, path: Path, waiting: Any = None) -> Iterator[None]:
        """Hold `path` alone. The operating system drops the lock of a process that dies, so none is ever left behind.

        Args:
            waiting: called once with the holder's name, if somebody else works on it.
        """
        from filelock import FileLock, Timeout

        path.mkdir(parents=True, exist_ok=True)
        lock, holder = FileLock(path / ".lock"), path / ".holder"
        try:
            lock.acquire(timeout=0)
        except Timeout:
            if waiting is not None:
                waiting(holder.read_text() if holder.exists() else "another process")
            lock.acquire()
        try:
            holder.write_text(f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%H:%M:%S')}")
            yield
        finally:
            lock.release()


def write_json(path: Path, value: Any) -> None:
    """Write JSON so that a reader sees the old file or the whole new one, also after a crash."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False))


def write_text(path: Path, text: str) -> None:
    """Write a file so that a reader sees the old one or the whole new one, also after a crash."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


class KeyedLog:
    """An append-only JSONL file whose lines are found by key; only keys and offsets are in memory.

    A last line torn by a crash is cut off on opening, so its key is simply missing and made again. Opening checks every line: a broken one in the
    middle is an error, never skipped. A key that is written again replaces the older line.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offsets: dict[str, int] = {}
        path.touch()
        self._load()
        self._file = path.open("r+b")
        self._file.seek(0, os.SEEK_END)

    def _load(self) -> None:
        end = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break
                try:
                    key = json.loads(line)["key"]
                except (ValueError, KeyError, TypeError):
                    raise StoreError(f"{self.path}: line {number} is damaged: delete that line, and what it held is made again.") from None
                self._offsets[key] = end
                end += len(line)
        if end < self.path.stat().st_size:
            os.truncate(self.path, end)

    def __contains__(self, key: str) -> bool:
        return key in self._offsets

    def __len__(self) -> int:
        return len(self._offsets)

    def append(self, key: str, record: Mapping[str, Any]) -> None:
        """Add one line; it is with the operating system when this returns, so a killed process loses nothing."""
        line = json.dumps({"key": key, **record}, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
        offset = self._file.seek(0, os.SEEK_END)
        self._file.write(line)
        self._file.flush()
        self._offsets[key] = offset

    def read(self, key: str) -> dict[str, Any]:
        self._file.seek(self._offsets[key])
        record: dict[str, Any] = json.loads(self._file.readline())
        return record

    def close(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def __enter__(self) -> KeyedLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
