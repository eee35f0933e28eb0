import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3.conversation import Row
from eagle3.evaluation.ngram import ngram_matches, replay_ngram

# (context, min_n, max_n, k, proposal) of vLLM 0.32's _find_longest_matched_ngram_and_propose_tokens, run on random contexts.
VLLM_PROPOSALS = [
    ([2, 0, 3, 3, 0, 3, 0, 3, 1, 3, 3, 0, 2, 1, 2], 2, 3, 4, []),
    ([3, 1, 1, 2, 3, 0, 1, 1, 1, 0, 0, 3, 3, 1, 3], 2, 4, 4, []),
    ([1, 0, 2, 1, 2, 1, 2, 1, 2, 2, 0, 1, 0, 0, 1, 0], 2, 3, 4, [0, 1, 0]),
    ([0, 0, 1, 1, 1, 1, 0, 1, 0], 2, 3, 5, [1, 0]),
    ([0, 2, 1, 2, 0, 2, 2, 0, 1, 1, 1, 0, 0, 0, 0], 2, 3, 4, [0]),
    ([0, 0, 0, 0, 0, 0, 0, 0, 0, 0], 2, 3, 3, [0, 0, 0]),
    ([2, 0, 2, 2, 3, 1, 2, 3, 3, 1, 2, 0, 3, 1], 2, 3, 3, [2, 3, 3]),
]


def naive_proposal(context: list[int], min_n: int, max_n: int, k: int) -> list[int]:
    """Longest n-gram first, earliest occurrence first, by looking everywhere."""
    for n in range(max_n, min_n - 1, -1):
        for start in range(len(context) - n):
            if context[start : start + n] == context[-n:]:
                return context[start + n : start + n + k]
    return []


@pytest.mark.parametrize(("context", "min_n", "max_n", "k", "proposal"), VLLM_PROPOSALS)
def test_proposals_are_those_of_vllm(context: list[int], min_n: int, max_n: int, k: int, proposal: list[int]) -> None:
    # The row goes on with the proposal, so that a wrong token would not match.
    matches, proposed = ngram_matches(context + proposal, len(context) - 1, k, max_n, min_n)
    assert proposed[0] == len(proposal)
    assert matches[0].tolist() == [index < len(proposal) for index in range(k)]
    assert naive_proposal(context, min_n, max_n, k) == proposal


@given(
    ids=st.lists(st.integers(0, 3), min_size=2, max_size=40),
    num_prompt_tokens=st.integers(0, 20),
    k=st.integers(1, 5),
    min_n=st.integers(1, 3),
    more=st.integers(0, 3),
)
def test_matches_are_those_of_a_search_at_every_position(ids: list[int], num_prompt_tokens: int, k: int, min_n: int, more: int) -> None:
    num_prompt_tokens = min(num_prompt_tokens, len(ids))
    matches, proposed = ngram_matches(ids, num_prompt_tokens, k, min_n + more, min_n)
    assert matches.shape == (len(ids) - num_prompt_tokens, k)
    for position in range(len(matches)):
        end = num_prompt_tokens + position + 1
        draft = naive_proposal(ids[:end], min_n, min_n + more, k)
        answer = ids[end : end + k]
        assert proposed[position] == len(draft)
        assert matches[position].tolist() == [index < min(len(draft), len(answer)) and draft[index] == answer[index] for index in range(k)]


def test_a_step_without_a_proposal_is_a_step() -> None:
    # The answer 1 2 3 repeats the prompt, then 7 8 9 is new: the first step drafts 3 and gets 7 as bonus, two more draft nothing.
    ids = [1, 2, 3, 5, 1, 2, 3, 7, 8, 9]
    report = replay_ngram([Row("a", "p", 0, ids, [0] * 5 + [1] * 5)], k=3, temperature=0.0)
    (counts,) = report.rows
    assert (counts.num_steps, counts.num_tokens, counts.accepted, counts.drafted) == (3, 4, (1, 0, 0), (1, 1, 1))
    assert report.acceptance_length == pytest.approx(4 / 3)
