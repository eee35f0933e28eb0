"""Our drafter on finished rows: every draft of every answer position from teacher-forced passes over stored states, no target needed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from eagle3.conversation import Row
from eagle3.drafter.ttt import draft_matches
from eagle3.evaluation.replay import Matches, replay
from eagle3.evaluation.report import AcceptanceReport
from eagle3.hidden_states import StateReader
from eagle3.training.batches import compact, load_batch, micro_batches


def replay_drafter(
    model: Any,
    rows: Sequence[Row],
    reader: StateReader,
    dtype: str,
    ks: Sequence[int],
    arm: str,
    temperature: float,
    advance: Callable[[int], None] = lambda _: None,
) -> list[AcceptanceReport]:
    """The drafter's acceptance on `rows`, one report for each k, all from one pass of max(ks) draft steps.

    Args:
        dtype: autocast format of the pass, "bfloat16" or "float32".
        temperature: the one the rows were sampled at.
        advance: told how many rows are done.
    """
    began = time.perf_counter()
    device = next(model.parameters()).device
    number_format = getattr(torch, dtype)
    matches: dict[str, Matches] = {}
    for group in micro_batches([compact(row) for row in rows]):
        batch = load_batch(group, reader, device, number_format)
        with torch.autocast(device.type, dtype=number_format, enabled=number_format != torch.float32):
            found = draft_matches(model, batch, num_steps=max(ks))
        matches |= {row.id: match.cpu().numpy() for row, match in zip(group, found, strict=True)}
        advance(len(matches))
    seconds = time.perf_counter() - began
    return [replay(rows, matches, arm, k, temperature, seconds=seconds) for k in ks]
