"""Acceptance without a server: walk finished rows as a speculating server would.

Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (2023): a step drafts k tokens, the target accepts the leading
ones that it would have said itself and adds one token of its own. Shapes: P answer tokens of a row, K the deepest draft position.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from eagle3.conversation import Row
from eagle3.errors import ConfigError, DataError
from eagle3.evaluation.report import AcceptanceReport, RowCounts

Matches = npt.NDArray[np.bool_]
Proposed = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Walk:
    """Counts of one row's decoding steps; the fields mean what they mean in `RowCounts`."""

    num_steps: int
    num_tokens: int
    accepted: tuple[int, ...]
    drafted: tuple[int, ...]


def walk(matches: Matches, k: int, proposed: Proposed | None = None) -> Walk:
    """The steps of a server that drafts k tokens at a time.

    `matches` is [P, K]: entry [p, s] says that token s of the draft that starts behind answer token p equals answer token p+1+s.
    `proposed` is [P]: how many tokens each draft has, for drafters that may propose fewer than K or none (default: always K).
    What lies past the row's end counts nowhere, and a step whose accepted tokens reach the end gets no bonus token (vllm#56101).
    Raises ConfigError when K < k.
    """
    num_answer_tokens, depth = matches.shape
    if k > depth:
        raise ConfigError(f"k={k} can't be replayed from drafts of {depth} tokens; draft at least {k} per position.")
    last = max(num_answer_tokens - 1, 0)
    inside = np.minimum(k, last - np.arange(num_answer_tokens))  # draft tokens that fall inside the row, [P]
    if proposed is not None:
        inside = np.minimum(inside, proposed)
    leading = np.logical_and.accumulate(matches[:, :k], axis=1).sum(axis=1)
    accepted = np.minimum(leading, inside)

    steps = []
    position = 0
    while position < last:
        steps.append(position)
        position += int(accepted[position]) + 1
    return Walk(len(steps), last, _reached(accepted[steps], k), _reached(inside[steps], k))


def replay_counts(matches: Matches, proposed: Proposed | None = None) -> dict[int, Walk]:
    """The walk of one row for every k from 1 to K."""
    return {k: walk(matches, k, proposed) for k in range(1, matches.shape[1] + 1)}


def replay(
    rows: Sequence[Row],
    matches_by_row: Mapping[str, Matches],
    arm: str,
    k: int,
    temperature: float,
    proposed_by_row: Mapping[str, Proposed] | None = None,
    seconds: float = 0.0,
) -> AcceptanceReport:
    """Walks every row and reports one arm at one k; the mappings go by row id, `seconds` is what making the drafts took.

    `temperature` is the one the rows were sampled at. Raises DataError, naming the row, when its drafts are missing or not one per answer token.
    """
    counts = []
    for row in rows:
        matches = matches_by_row.get(row.id)
        if matches is None or len(matches) != sum(row.loss_mask):
            found = "none" if matches is None else len(matches)
            raise DataError(f"Row {row.id} has {sum(row.loss_mask)} answer tokens, but drafts for {found}: replay this row again.")
        steps = walk(matches, k, None if proposed_by_row is None else proposed_by_row[row.id])
        counts.append(RowCounts(row.id, row.prompt_id, row.category, steps.num_steps, steps.num_tokens, steps.accepted, steps.drafted))
    return AcceptanceReport(arm, k, temperature, "replay", tuple(counts), seconds)


def _reached(lengths: npt.NDArray[np.int64], k: int) -> tuple[int, ...]:
    """How many of `lengths` go beyond each position 0..k-1."""
    return tuple((lengths[:, None] > np.arange(k)).sum(axis=0).tolist())
