"""Tracking: the run folder is the truth, W&B a mirror of it; read back from its files."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from eagle3.config import TrackingConfig
from eagle3.tracking import Tracker, read_metrics


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    run, artifact = tmp_path / "run", tmp_path / "artifact"
    run.mkdir()
    artifact.mkdir()
    return run, artifact


def test_metrics_lie_in_the_run_and_in_the_artifact_and_a_resumed_step_counts_once(folders: tuple[Path, Path]) -> None:
    run, artifact = folders
    tracker = Tracker(TrackingConfig(mode="disabled"), run, {})
    for values in ((1.0, 2.0, 3.0), (2.5, 1.5)):  # killed behind step 3, resumed from step 1
        with tracker.stage("train", "abc", artifact) as track:
            for step, value in enumerate(values, 1 if len(values) == 3 else 2):
                track.log({"step": step, "train/loss": value})
    assert [line["train/loss"] for line in read_metrics(artifact)] == [1.0, 2.5, 1.5]
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 5


@pytest.mark.slow
def test_an_offline_run_holds_group_job_type_configuration_history_and_summary(folders: tuple[Path, Path]) -> None:
    run, artifact = folders
    tracker = Tracker(TrackingConfig(group="sweep", tags=["demo"]), run, {"training": {"lr": 1e-3}})
    with tracker.stage("train", "0123456789abcdef", artifact) as track:
        track.log({"step": 1, "train/loss": 2.0})
        track.summary({"eval/acceptance_length": 1.7})
    (file,) = (run / "wandb").glob("offline-run-*/run-*.wandb")
    records = _records(file)
    (started,) = [record.run for record in records if record.WhichOneof("record_type") == "run"]
    assert (started.run_group, started.job_type, started.run_id) == ("sweep", "train", "train-0123456789abcdef")
    assert list(started.tags) == ["demo"]
    assert {item.key: json.loads(item.value_json) for item in started.config.update}["training"] == {"lr": 1e-3}
    history = [_values(record.history.item) for record in records if record.WhichOneof("record_type") == "history"]
    assert any(line.get("train/loss") == 2.0 and line.get("step") == 1 for line in history)
    summary: dict[str, Any] = {}
    for record in records:
        if record.WhichOneof("record_type") == "summary":
            summary |= _values(record.summary.update)
    assert summary["eval/acceptance_length"] == 1.7


def _records(file: Path) -> list[Any]:
    """The protobuf records of a .wandb file: a log of LevelDB's format (blocks of 32 KiB, each piece behind checksum, length and kind) behind 7 bytes.

    wandb 0.31 reads it in its own binary alone.
    """
    from wandb.proto import wandb_internal_pb2

    record_type: Any = wandb_internal_pb2.Record  # type: ignore[attr-defined]
    content, position, pieces, records = file.read_bytes(), 7, b"", []
    while position + 7 <= len(content):
        if 32768 - position % 32768 < 7:  # no piece begins in the last bytes of a block
            position += 32768 - position % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", content, position)
        position += 7
        pieces += content[position : position + length]
        position += length
        if kind in (1, 4):  # whole, or the last piece
            record = record_type()
            record.ParseFromString(pieces)
            records.append(record)
            pieces = b""
    return records


def _values(items: Any) -> dict[str, Any]:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
