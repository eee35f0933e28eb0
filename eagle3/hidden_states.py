"""Hidden states on disk: safetensors shards that describe themselves, appended whole and read by memory map.

A shard holds `states` [tokens, layers, hidden] (the auxiliary layers in order, then the final pre-norm state) and `input_ids` [tokens] of some rows; its
header names the rows, where each lies, and the layers. A shard appears by rename, so there is none that is half written, and nothing else to keep in step.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3.errors import CaptureError

if TYPE_CHECKING:
    import torch


class StateWriter:
    """Collects rows' states and writes them in shards of about `shard_bytes`."""

    def __init__(self, folder: Path, layers: Sequence[int], shard_bytes: int) -> None:
        self.folder, self.layers, self.shard_bytes = folder, list(layers), shard_bytes
        self._rows: list[dict[str, Any]] = []
        self._states: list[torch.Tensor] = []
        self._ids: list[int] = []
        self._num_bytes = 0
        folder.mkdir(parents=True, exist_ok=True)
        for torn in folder.glob(".shard-*"):
            torn.unlink()

    def append(self, row_id: str, input_ids: Sequence[int], states: torch.Tensor) -> None:
        """Add one row.

        Args:
            states: [len(input_ids), layers, hidden], finite.

        Raises:
            CaptureError: the shape is not that, or a value is not finite.
        """
        import torch

        if states.dim() != 3 or states.shape[0] != len(input_ids) or states.shape[1] != len(self.layers):
            raise CaptureError(f"row {row_id}: states of shape {list(states.shape)} do not fit its {len(input_ids)} tokens and {len(self.layers)} layers.")
        if not torch.isfinite(states).all():
            raise CaptureError(
                f"row {row_id}: its hidden states hold values that are not finite; the target overflows in this number format, try engine.dtype=float32."
            )
        self._rows.append({"id": row_id, "start": len(self._ids), "length": len(input_ids)})
        self._states.append(states.contiguous())
        self._ids += input_ids
        self._num_bytes += states.numel() * states.element_size()
        if self._num_bytes >= self.shard_bytes:
            self.flush()

    def flush(self) -> None:
        """Write what was collected as one shard."""
        import torch
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        if not self._rows:
            return
        number = max((int(path.stem.split("-")[1]) for path in self.folder.glob("shard-*.safetensors")), default=-1) + 1
        temporary, final = self.folder / f".shard-{number:06d}", self.folder / f"shard-{number:06d}.safetensors"
        tensors = {"states": torch.cat(self._states), "input_ids": torch.tensor(self._ids, dtype=torch.int32)}
        try:
            save_file(tensors, temporary, metadata={"rows": json.dumps(self._rows), "layers": json.dumps(self.layers)})
        except (OSError, SafetensorError) as error:
            temporary.unlink(missing_ok=True)
            raise CaptureError(
                f"{self.folder}: hidden states can't be written ({error}); free space or give paths.store a bigger volume, then run again."
            ) from None
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(final)
        self._rows, self._states, self._ids, self._num_bytes = [], [], [], 0


class StateReader:
    """Rows' states by id, whatever the shard; memory-mapped, so only what is read is loaded."""

    def __init__(self, folder: Path) -> None:
        from safetensors import safe_open

        self.folder = folder
        self.layers: list[int] = []
        self._shards: list[Any] = []  # safetensors gives its handles no type
        self._where: dict[str, tuple[int, int, int]] = {}
        for path in sorted(folder.glob("shard-*.safetensors")):
            try:
                shard: Any = safe_open(path, framework="pt")
                metadata = shard.metadata()
                rows = json.loads(metadata["rows"])
            except Exception as error:
                raise CaptureError(f"{path} is damaged ({error}): delete it, and the next run captures its rows again.") from None
            self.layers = json.loads(metadata["layers"])
            for row in rows:
                self._where[row["id"]] = (len(self._shards), row["start"], row["start"] + row["length"])
            self._shards.append(shard)

    def __contains__(self, row_id: str) -> bool:
        return row_id in self._where

    def read(self, row_id: str, input_ids: Sequence[int]) -> torch.Tensor:
        """States [tokens, layers, hidden] of one row.

        Args:
            input_ids: what the row's tokens are known to be; the stored ones must be the same.

        Raises:
            CaptureError: the row is not there, belongs to other tokens, or holds a value that is not finite.
        """
        import torch

        if row_id not in self._where:
            raise CaptureError(f"row {row_id} has no hidden states in {self.folder}: run the capture stage again.")
        shard, start, stop = self._where[row_id]
        stored = self._shards[shard].get_slice("input_ids")[start:stop].tolist()
        if stored != list(input_ids):
            raise CaptureError(f"row {row_id}: the hidden states in {self.folder} were captured from other tokens; delete that folder and run again.")
        states: torch.Tensor = self._shards[shard].get_slice("states")[start:stop]
        if not torch.isfinite(states).all():
            raise CaptureError(f"row {row_id}: its hidden states in {self.folder} are not finite; delete that folder and run again.")
        return states
