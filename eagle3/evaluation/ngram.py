"""Prompt lookup, the drafter that needs no training: what followed the last few tokens when they were seen before.

The same proposals as vLLM's `ngram` method (vllm/v1/spec_decode/ngram_proposer.py, 0.32): of the n-grams that end the context the longest one
seen before, at its *earliest* occurrence (overlaps allowed), and of what follows there at most what the context holds.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from eagle3.conversation import Row
from eagle3.evaluation.replay import Matches, Proposed, replay
from eagle3.evaluation.report import AcceptanceReport


def ngram_matches(input_ids: Sequence[int], num_prompt_tokens: int, k: int, max_n: int = 4, min_n: int = 2) -> tuple[Matches, Proposed]:
    """What prompt lookup drafts behind each answer token of a row: `matches` [P, k] and `proposed` [P], as `replay.walk` reads them.

    Linear in the row's length: a dictionary remembers where each n-gram ended first. vLLM's cap at the model's length is left out, a row is shorter.
    """
    num_answer_tokens = len(input_ids) - num_prompt_tokens
    matches = np.zeros((num_answer_tokens, k), dtype=np.bool_)
    proposed = np.zeros(num_answer_tokens, dtype=np.int64)
    first_end: dict[tuple[int, ...], int] = {}
    for end in range(1, len(input_ids) + 1):
        source = end
        for n in range(min_n, min(max_n, end) + 1):  # ascending, so that the longest n-gram seen before has the last word
            seen = first_end.setdefault(tuple(input_ids[end - n : end]), end)
            source = seen if seen < end else source
        position = end - 1 - num_prompt_tokens
        if position >= 0:
            draft = input_ids[source : min(source + k, end)]
            proposed[position] = len(draft)
            for index, (token, answer) in enumerate(zip(draft, input_ids[end : end + k], strict=False)):
                matches[position, index] = token == answer
    return matches, proposed


def replay_ngram(rows: Sequence[Row], k: int, temperature: float, max_n: int = 4, min_n: int = 2) -> AcceptanceReport:
    """The `ngram` arm on finished rows, whose answers are the masked tail of their ids."""
    started = time.perf_counter()
    drafts = {row.id: ngram_matches(row.input_ids, len(row.input_ids) - sum(row.loss_mask), k, max_n, min_n) for row in rows}
    matches = {row_id: draft[0] for row_id, draft in drafts.items()}
    proposed = {row_id: draft[1] for row_id, draft in drafts.items()}
    return replay(rows, matches, "ngram", k, temperature, proposed, seconds=time.perf_counter() - started)
