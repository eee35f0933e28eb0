"""Speed-ups, their verdicts, and the speed expected at a k that was not measured."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from eagle3.errors import DataError
from eagle3.evaluation.live import LiveReport
from eagle3.evaluation.report import AcceptanceReport, RowCounts
from eagle3.evaluation.speed import best_ks, compare_speed, expect, fit_step_cost
from eagle3.evaluation.streaming import TimedAnswer
from eagle3.serving.metrics import Counters

NUM_PROMPTS, NUM_TOKENS, FIRST_S = 20, 101, 0.1


def served(arm: str, k: int, tokens_per_step: float, step_s: float, concurrency: int = 1, noise: float = 0.0, prompts: int = NUM_PROMPTS) -> LiveReport:
    """A pass in which every answer has 100 tokens behind its first, at so many a step."""
    rng = np.random.default_rng(concurrency + 10 * k)
    num_steps = round(100 / tokens_per_step)
    answers = tuple(
        TimedAnswer(f"p{i}-0", f"p{i}", tuple(range(NUM_TOKENS)), FIRST_S, 1, FIRST_S + num_steps * step_s * (1 + noise * rng.standard_normal()))
        for i in range(prompts)
    )
    counters = Counters(prompts * NUM_TOKENS, prompts * num_steps, k * prompts * num_steps, prompts * (100 - num_steps), (0,) * k) if k else Counters()
    return LiveReport(arm, k, concurrency, 0.0, answers, counters, (), sum(answer.seconds for answer in answers) / concurrency)


def replayed(tokens_per_step: Sequence[float], arm: str = "ours") -> list[AcceptanceReport]:
    """Replays at k = 1, 2, ... with so many tokens a step."""
    reports = []
    for k, rate in enumerate(tokens_per_step, 1):
        steps = round(100 / rate)
        rows = tuple(RowCounts(f"p{i}-0", f"p{i}", "", steps, 100, (100 - steps, *[0] * (k - 1)), (steps,) * k) for i in range(NUM_PROMPTS))
        reports.append(AcceptanceReport(arm, k, 0.0, "replay", rows, 1.0))
    return reports


def test_a_speed_up_is_the_ratio_of_tokens_a_second() -> None:
    gain = compare_speed(served("ours", 3, 2.0, 0.012), served("none", 0, 1.0, 0.010))
    assert gain.estimate == pytest.approx((0.1 + 1.0) / (0.1 + 50 * 0.012))
    assert (gain.verdict, gain.num_prompts, gain.prompts_needed) == ("better", NUM_PROMPTS, None)


def test_slower_and_unresolved_are_said_and_how_many_prompts_it_would_take() -> None:
    plain = served("none", 0, 1.0, 0.010, noise=0.05)
    assert compare_speed(served("ours", 3, 2.0, 0.030, noise=0.05), plain).verdict == "worse"
    close = compare_speed(served("ours", 3, 2.0, 0.0198, noise=0.2), plain)
    assert close.low is not None and close.high is not None and close.low < 1 < close.high
    assert close.verdict == "not resolved" and close.prompts_needed is not None and close.prompts_needed > NUM_PROMPTS
    few = compare_speed(served("ours", 3, 2.0, 0.012, prompts=4), served("none", 0, 1.0, 0.010, prompts=4))
    assert few.verdict == "not resolved" and "too few" in few.reason


def test_only_the_same_prompts_with_as_many_in_flight_are_compared() -> None:
    for other in (served("none", 0, 1.0, 0.01, concurrency=8), served("none", 0, 1.0, 0.01, prompts=5)):
        with pytest.raises(DataError, match="can't be compared"):
            compare_speed(served("ours", 3, 2.0, 0.012), other)


def test_the_cost_of_a_step_is_a_line_through_the_measured_ks() -> None:
    plain = served("none", 0, 1.0, 0.010)
    cost = fit_step_cost([served("ours", 1, 1.6, 0.013), served("ours", 5, 2.5, 0.021)], plain)
    assert cost is not None and cost.at(3) == pytest.approx(0.017) and cost.draft_s == pytest.approx(0.002)
    alone = fit_step_cost([served("ours", 3, 2.0, 0.016)], plain)
    assert alone is not None and [alone.at(0), alone.at(3)] == pytest.approx([0.010, 0.016])
    noise = fit_step_cost([served("ours", 1, 1.6, 0.013), served("ours", 3, 2.0, 0.011)], plain)
    assert noise is not None and noise.draft_s == 0 and noise.at(3) == pytest.approx(0.012)


def test_the_best_k_weighs_acceptance_against_the_cost_of_a_step() -> None:
    """Drafts that cost little are worth five a step; where each makes the step half as long again, one is enough."""
    replays = replayed((1.6, 2.0, 2.2, 2.35, 2.45))
    cheap, dear = (0.010, 0.0102, 0.0106), (0.020, 0.030, 0.050)
    live = []
    for concurrency, (alone, at_1, at_3) in ((1, cheap), (8, dear)):
        live += [served("none", 0, 1.0, alone, concurrency), served("ours", 1, 1.6, at_1, concurrency), served("ours", 3, 2.2, at_3, concurrency)]
    found = expect(replays, live)
    assert best_ks(found, "ours") == {1: 5, 8: 1}
    measured = {(one.concurrency, one.k): one for one in found if one.measured is not None}
    assert sorted(measured) == [(1, 1), (1, 3), (8, 1), (8, 3)]
    for one in measured.values():
        assert one.expected == pytest.approx(one.measured, rel=0.02)


def test_nothing_is_expected_without_the_target_alone() -> None:
    assert expect(replayed((1.6,)), [served("ours", 1, 1.6, 0.01)]) == []
