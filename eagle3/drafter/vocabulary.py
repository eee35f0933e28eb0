"""Which of the target's tokens the drafter can propose."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle3.conversation import Row
from eagle3.errors import DrafterError


@dataclass(frozen=True)
class VocabularyMap:
    """The draft vocabulary as speculators stores it: `d2t` [draft ids] holds target id - draft id, `t2d` [target ids] is true on those that can be drafted."""

    d2t: Tensor
    t2d: Tensor

    @property
    def draft_ids(self) -> Tensor:
        """Target id of each draft id, ascending. [draft vocabulary]"""
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t


def build_vocabulary_map(counts: Mapping[int, int], draft_vocab_size: int, target_vocab_size: int, pinned: Sequence[int] = ()) -> VocabularyMap:
    """Choose the `draft_vocab_size` most frequent tokens, ties by id; `pinned` ones first, and the lowest unused ids if there are too few.

    Raises:
        DrafterError: a size that can't be met, or a token outside the target's vocabulary.
    """
    from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution

    fix = f"set training.draft_vocab_size between 1 and {target_vocab_size}"
    if not 0 < draft_vocab_size <= target_vocab_size:
        raise DrafterError(f"training.draft_vocab_size is {draft_vocab_size}, but the target has {target_vocab_size} tokens: {fix}.")
    if len(set(pinned)) > draft_vocab_size:
        raise DrafterError(f"training.draft_vocab_size is {draft_vocab_size}, less than the {len(set(pinned))} tokens that must be in it: {fix}, above that.")
    outside = [token for token in (*pinned, *counts) if not 0 <= token < target_vocab_size]
    if outside:
        raise DrafterError(f"Token {outside[0]} is outside the target's vocabulary of {target_vocab_size}: the rows were made with another tokenizer.")
    first = max(counts.values(), default=0) + 1
    d2t, t2d = build_vocab_mappings_from_distribution({**counts, **dict.fromkeys(pinned, first)}, draft_vocab_size, target_vocab_size)
    return VocabularyMap(d2t, t2d)


def count_tokens(rows: Iterable[Row]) -> Counter[int]:
    """How often each token is supervised."""
    counts: Counter[int] = Counter()
    for row in rows:
        counts.update(_supervised(row))
    return counts


def coverage(vocabulary: VocabularyMap, rows: Iterable[Row]) -> float:
    """Share of supervised tokens that the drafter can propose; the others always end a draft. 0 if there are none."""
    draftable = set(vocabulary.draft_ids.tolist())
    counts = count_tokens(rows)
    return sum(count for token, count in counts.items() if token in draftable) / max(counts.total(), 1)


def _supervised(row: Row) -> Iterator[int]:
    return (token for token, on in zip(row.input_ids, row.loss_mask, strict=True) if on)
