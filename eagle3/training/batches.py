"""Rows and their hidden states as padded batches, in an order that depends on the seed and the epoch alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from eagle3.conversation import Row
from eagle3.drafter.ttt import TTTBatch
from eagle3.hidden_states import StateReader
from eagle3.prompts import in_fraction
from eagle3.store import digest

# Padded tokens that go through the drafter at once where no setting says so.
MICRO_BATCH_TOKENS = 8192


@dataclass(frozen=True)
class CompactRow:
    """A row as tensors, a few bytes a token: int32 ids [L] and a bool mask [L]."""

    id: str
    input_ids: torch.Tensor
    loss_mask: torch.Tensor

    @property
    def num_supervised(self) -> int:
        """Tokens that a draft can predict: the drafter needs two tokens before them."""
        return int(self.loss_mask[2:].sum())


def compact(row: Row) -> CompactRow:
    return CompactRow(row.id, torch.tensor(row.input_ids, dtype=torch.int32), torch.tensor(row.loss_mask, dtype=torch.bool))


def count(rows: Iterable[CompactRow], normalizer: str) -> int:
    """What the loss of an optimiser step is divided by: supervised tokens, all positions, or rows (`TTTBatch.count` of all of them together)."""
    each = {"supervised": lambda row: row.num_supervised, "positions": lambda row: len(row.input_ids), "rows": lambda row: 1}[normalizer]
    return sum(map(each, rows))


def split_validation(prompt_ids: Iterable[str], fraction: float) -> set[str]:
    """The conversations held out for validation: by hash, so they do not change when others are added.

    Where the fraction would hold out none of them, or all, the one whose hash is lowest is held out.
    """
    ids = set(prompt_ids)
    held_out = {prompt_id for prompt_id in ids if in_fraction(prompt_id, fraction, "validation")}
    if ids and (not held_out or held_out == ids):
        held_out = {min(ids, key=lambda prompt_id: digest(["validation", prompt_id]))}
    return held_out


def epoch_steps(rows: Sequence[CompactRow], batch_tokens: int, seed: int, epoch: int) -> list[list[CompactRow]]:
    """The rows of each optimiser step of one epoch: each row once, about `batch_tokens` supervised tokens a step."""
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch)).tolist()
    steps: list[list[CompactRow]] = [[]]
    num_tokens = 0
    for index in order:
        if num_tokens >= batch_tokens:
            steps.append([])
            num_tokens = 0
        steps[-1].append(rows[index])
        num_tokens += rows[index].num_supervised
    return steps


def micro_batches(rows: Sequence[CompactRow], max_tokens: int = MICRO_BATCH_TOKENS) -> Iterator[list[CompactRow]]:
    """The same rows, sorted by length so that padding is small, in groups of at most `max_tokens` padded tokens (or one longer row)."""
    group: list[CompactRow] = []
    for row in sorted(rows, key=lambda row: len(row.input_ids)):
        if group and len(row.input_ids) * (len(group) + 1) > max_tokens:
            yield group
            group = []
        group.append(row)
    if group:
        yield group


def load_batch(rows: Sequence[CompactRow], reader: StateReader, device: torch.device, dtype: torch.dtype) -> TTTBatch:
    """Rows and their states, padded on the right.

    Raises:
        CaptureError: a row's states are missing, of other tokens, or not finite; the row is named.
    """
    states = [reader.read(row.id, row.input_ids.tolist()).to(dtype) for row in rows]
    pad = torch.nn.utils.rnn.pad_sequence
    return TTTBatch(
        input_ids_BL=pad([row.input_ids.long() for row in rows], batch_first=True).to(device),
        loss_mask_BL=pad([row.loss_mask for row in rows], batch_first=True).to(device),
        lengths_B=torch.tensor([len(row.input_ids) for row in rows], device=device),
        aux_BLM=pad([state[:, :-1].flatten(1) for state in states], batch_first=True).to(device),
        final_BLH=pad([state[:, -1] for state in states], batch_first=True).to(device),
    )
