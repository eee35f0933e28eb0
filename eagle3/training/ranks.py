"""The processes that share each optimiser step.

Every process knows all rows of a step, takes its part of them, and divides its loss by what *all* of them count; the sum of the gradients is then that of one
process. There is no DDP or FSDP wrapper: both hang on a module's forward, and the TTT forward calls the weights themselves. One layer and its optimiser
state fit a GPU even for the largest targets (about 20 GiB at hidden size 7168), so there is nothing to shard.
"""

from __future__ import annotations

import datetime
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import distributed

from eagle3.training.batches import CompactRow

# Others wait this long while the first process validates.
_TIMEOUT = datetime.timedelta(hours=12)


@dataclass(frozen=True)
class Ranks:
    """This process's place among `size`; one alone needs no communication."""

    rank: int = 0
    size: int = 1

    @staticmethod
    def join(device: torch.device) -> Ranks:
        """Meet the other processes that torchrun started."""
        distributed.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=_TIMEOUT)
        return Ranks(distributed.get_rank(), distributed.get_world_size())

    def leave(self) -> None:
        """Say good-bye to the others."""
        if self.size > 1:
            distributed.destroy_process_group()

    @property
    def is_first(self) -> bool:
        """Whether this process validates, writes and reports."""
        return self.rank == 0

    def share(self, rows: Sequence[CompactRow]) -> Sequence[CompactRow]:
        """This process's part of a step's rows, with as many and as long ones as the others'."""
        if self.size == 1:
            return rows
        return sorted(rows, key=lambda row: len(row.input_ids))[self.rank :: self.size]

    def add_up(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replace each tensor by its sum over the processes, in one message."""
        if self.size == 1:
            return
        flat = torch.cat([tensor.flatten().float() for tensor in tensors])
        distributed.all_reduce(flat)
        for tensor, total in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(total.view_as(tensor))

    def from_first(self, value: float, device: torch.device) -> float:
        """The first process's value, in all of them; they wait for it."""
        if self.size == 1:
            return value
        message = torch.tensor(value, dtype=torch.float64, device=device)
        distributed.broadcast(message, 0)
        return float(message)


@contextmanager
def on_sigterm(act: Callable[[], None]) -> Iterator[None]:
    """Let SIGTERM do this instead of ending the process, so that work stops where it can be taken up again; afterwards all is as before."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread may handle signals
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: act())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
