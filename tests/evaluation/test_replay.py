import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from eagle3.conversation import Row
from eagle3.errors import ConfigError, DataError
from eagle3.evaluation.replay import Matches, Proposed, Walk, replay, replay_counts, walk

MATCHES = arrays(np.bool_, array_shapes(min_dims=2, max_dims=2, min_side=1, max_side=24), elements=st.booleans())


Case = tuple[Matches, Proposed | None, int]


@st.composite
def drafts(draw: st.DrawFn) -> Case:
    matches = draw(MATCHES)
    num_answer_tokens, depth = matches.shape
    matches &= np.arange(num_answer_tokens)[:, None] + np.arange(depth) + 1 < num_answer_tokens  # nothing to equal past the row's end
    proposed = draw(st.none() | arrays(np.int64, num_answer_tokens, elements=st.integers(0, depth)))
    return matches, proposed, draw(st.integers(1, depth))


def naive_walk(matches: Matches, k: int, proposed: Proposed | None) -> Walk:
    """One token at a time, as a server that checks each draft token against the answer."""
    num_tokens_left = len(matches) - 1
    accepted, drafted = [0] * k, [0] * k
    num_steps = emitted = position = 0
    while num_tokens_left > 0:
        num_steps += 1
        rejected = False
        num_drafted = k if proposed is None else min(k, proposed[position])
        start = position
        for index in range(num_drafted):
            if index >= len(matches) - 1 - start:
                break
            drafted[index] += 1
            if not rejected and matches[start, index]:
                accepted[index] += 1
                position, emitted, num_tokens_left = position + 1, emitted + 1, num_tokens_left - 1
            else:
                rejected = True
        if num_tokens_left:  # the bonus token
            position, emitted, num_tokens_left = position + 1, emitted + 1, num_tokens_left - 1
    return Walk(num_steps, emitted, tuple(accepted), tuple(drafted))


@given(drafts())
def test_the_walk_is_that_of_a_naive_server(case: Case) -> None:
    matches, proposed, k = case
    assert walk(matches, k, proposed) == naive_walk(matches, k, proposed)


@given(drafts())
def test_every_token_but_the_first_is_produced_once(case: Case) -> None:
    matches, proposed, _ = case
    for steps in replay_counts(matches, proposed).values():
        assert steps.num_tokens == len(matches) - 1
        assert steps.num_steps + sum(steps.accepted) - steps.num_tokens in (0, 1)  # the last step may lack its bonus
        assert all(a <= d <= steps.num_steps for a, d in zip(steps.accepted, steps.drafted, strict=True))


@given(drafts())
def test_k_does_not_depend_on_deeper_columns(case: Case) -> None:
    matches, proposed, k = case
    assert replay_counts(matches, proposed)[k] == walk(matches[:, :k], k, proposed)


def test_a_row_that_ends_inside_the_accepted_prefix_has_no_bonus_and_counts_nothing_past_it() -> None:
    right = np.arange(5)[:, None] + np.arange(4) < 4  # five answer tokens, every draft right as far as the row goes
    assert walk(right, 3) == Walk(num_steps=1, num_tokens=4, accepted=(1, 1, 1), drafted=(1, 1, 1))
    assert walk(right, 4) == Walk(num_steps=1, num_tokens=4, accepted=(1, 1, 1, 1), drafted=(1, 1, 1, 1))
    assert walk(right, 2) == Walk(num_steps=2, num_tokens=4, accepted=(2, 1), drafted=(2, 1))


@pytest.mark.parametrize("num_answer_tokens", [0, 1])
def test_an_answer_from_the_prefill_alone_has_no_step(num_answer_tokens: int) -> None:
    assert walk(np.zeros((num_answer_tokens, 3), dtype=np.bool_), 3) == Walk(0, 0, (0, 0, 0), (0, 0, 0))


def test_k_deeper_than_the_drafts_is_refused() -> None:
    with pytest.raises(ConfigError, match="k=4 can't be replayed from drafts of 3 tokens"):
        walk(np.zeros((5, 3), dtype=np.bool_), 4)


def row(row_id: str, num_answer_tokens: int) -> Row:
    return Row(row_id, f"prompt-{row_id}", 0, list(range(2 + num_answer_tokens)), [0, 0] + [1] * num_answer_tokens, "chat")


def test_a_report_holds_each_row_once() -> None:
    matches = {"a": np.zeros((4, 2), dtype=np.bool_), "b": np.zeros((1, 2), dtype=np.bool_)}
    report = replay([row("a", 4), row("b", 1)], matches, "ours", k=2, temperature=0.7)
    assert [(counts.row_id, counts.prompt_id, counts.category, counts.num_steps) for counts in report.rows] == [
        ("a", "prompt-a", "chat", 3),
        ("b", "prompt-b", "chat", 0),
    ]
    assert (report.arm, report.k, report.temperature, report.source, report.acceptance_length) == ("ours", 2, 0.7, "replay", 1.0)


@pytest.mark.parametrize(("matches", "found"), [({}, "none"), ({"a": np.zeros((3, 2), dtype=np.bool_)}, "3")])
def test_drafts_that_are_not_one_per_answer_token_name_the_row(matches: dict[str, Matches], found: str) -> None:
    with pytest.raises(DataError, match=f"Row a has 4 answer tokens, but drafts for {found}"):
        replay([row("a", 4)], matches, "ours", k=2, temperature=0.0)
