"""The draft vocabulary: which tokens, in what order, and what share of the text it covers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3.conversation import Row
from eagle3.drafter.vocabulary import build_vocabulary_map, count_tokens, coverage
from eagle3.errors import DrafterError

TARGET_VOCAB = 40


def row(input_ids: list[int], loss_mask: list[int]) -> Row:
    return Row(id="r", prompt_id="p", turn=0, input_ids=input_ids, loss_mask=loss_mask)


@settings(deadline=None, max_examples=50)  # the first call imports speculators
@given(
    counts=st.dictionaries(st.integers(0, TARGET_VOCAB - 1), st.integers(1, 9)),
    size=st.integers(2, TARGET_VOCAB),
    pinned=st.lists(st.integers(0, TARGET_VOCAB - 1), max_size=2),
)
def test_holds_pinned_and_most_frequent_tokens_and_is_always_full(counts: dict[int, int], size: int, pinned: list[int]) -> None:
    vocabulary = build_vocabulary_map(counts, size, TARGET_VOCAB, pinned)
    ids = vocabulary.draft_ids.tolist()
    assert ids == sorted(set(ids)) and len(ids) == size
    assert set(pinned) <= set(ids) <= set(range(TARGET_VOCAB))
    assert torch.equal(vocabulary.t2d.nonzero().squeeze(1), vocabulary.draft_ids)
    left_out = [count for token, count in counts.items() if token not in ids]
    kept = [counts.get(token, 0) for token in ids if token not in pinned]
    assert max(left_out, default=0) <= min(kept, default=max(left_out, default=0))


def test_does_not_depend_on_the_order_of_counting() -> None:
    counts = {token: 1 + token % 3 for token in range(30)}
    reverse = dict(reversed(counts.items()))
    assert torch.equal(build_vocabulary_map(counts, 12, TARGET_VOCAB).d2t, build_vocabulary_map(reverse, 12, TARGET_VOCAB).d2t)


def test_follows_the_sizes_asked_for() -> None:
    counts = {7: 3, 9: 1}
    shapes = [(len(each.d2t), len(each.t2d)) for each in (build_vocabulary_map(counts, draft, target) for draft, target in ((4, 20), (6, 20), (6, 30)))]
    assert shapes == [(4, 20), (6, 20), (6, 30)]


@pytest.mark.parametrize("size", [0, -1, TARGET_VOCAB + 1])
def test_impossible_sizes_name_the_setting(size: int) -> None:
    with pytest.raises(DrafterError, match=rf"training\.draft_vocab_size is {size}.*between 1 and 40"):
        build_vocabulary_map({1: 1}, size, TARGET_VOCAB)


def test_tokens_that_do_not_fit_are_refused() -> None:
    with pytest.raises(DrafterError, match="3 tokens that must be in it"):
        build_vocabulary_map({}, 2, TARGET_VOCAB, pinned=[1, 2, 3])
    with pytest.raises(DrafterError, match="Token 40 is outside"):
        build_vocabulary_map({40: 1}, 2, TARGET_VOCAB)


def test_coverage_counts_supervised_tokens_only() -> None:
    rows = [row([1, 2, 3, 3], [0, 1, 1, 1]), row([5, 3], [0, 1])]
    assert count_tokens(rows) == {2: 1, 3: 3}
    assert coverage(build_vocabulary_map({3: 1}, 1, TARGET_VOCAB), rows) == 0.75
    assert coverage(build_vocabulary_map({3: 1}, 1, TARGET_VOCAB), []) == 0.0
