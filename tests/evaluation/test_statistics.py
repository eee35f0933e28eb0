import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from eagle3.errors import DataError, Eagle3Error
from eagle3.evaluation.report import AcceptanceReport, RowCounts
from eagle3.evaluation.statistics import Difference, Interval, bootstrap_interval, compare_arms

Counts = Sequence[int] | npt.NDArray[np.int64]


def report(accepted: Counts, steps: Counts, arm: str = "ours", k: int = 3, temperature: float = 0.0, source: str = "replay") -> AcceptanceReport:
    """A report with one row per prompt and these accepted tokens and steps."""
    rows = tuple(
        RowCounts(f"r{index}", f"p{index}", "", int(s), int(a + s), (int(a), 0, 0), (int(s),) * 3)
        for index, (a, s) in enumerate(zip(accepted, steps, strict=True))
    )
    return AcceptanceReport(arm, k, temperature, source, rows, 0.0)


def bounds(interval: Interval | Difference) -> tuple[float, float]:
    assert interval.low is not None and interval.high is not None
    return interval.low, interval.high


def random_counts(num_prompts: int, mean: float = 1.2, seed: int = 0) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Accepted tokens and steps of prompts whose own acceptance scatters around `mean`."""
    rng = np.random.default_rng(seed)
    steps = rng.integers(20, 60, num_prompts)
    return rng.poisson(steps * rng.gamma(20, mean / 20, num_prompts)), steps


def test_the_interval_holds_the_estimate_and_repeats() -> None:
    ours = report(*random_counts(50))
    interval = bootstrap_interval(ours)
    assert interval.method == "bca"
    low, high = bounds(interval)
    assert low < ours.acceptance_length < high
    assert bootstrap_interval(ours) == interval


def test_the_interval_is_as_wide_as_the_normal_theory_of_a_ratio_says() -> None:
    accepted, steps = random_counts(200)
    low, high = bounds(bootstrap_interval(report(accepted, steps)))
    residuals = accepted - accepted.sum() / steps.sum() * steps
    expected = 2 * 1.96 * residuals.std(ddof=1) / np.sqrt(len(steps)) / steps.mean()
    assert high - low == pytest.approx(expected, rel=0.1)


def test_nine_in_ten_intervals_and_more_hold_the_truth() -> None:
    truth = 1 + 1.2
    intervals = [bounds(bootstrap_interval(report(*random_counts(40, seed=seed)))) for seed in range(100)]
    assert sum(low < truth < high for low, high in intervals) >= 88


def test_pairing_resolves_what_separate_intervals_do_not() -> None:
    accepted, steps = random_counts(40)
    ours, baseline = report(accepted + 2, steps), report(accepted, steps, arm="baseline")
    assert bounds(bootstrap_interval(ours))[0] < bounds(bootstrap_interval(baseline))[1]
    difference = compare_arms(ours, baseline)
    assert difference.verdict == "better"
    assert difference.estimate == pytest.approx(ours.acceptance_length - baseline.acceptance_length)
    low, high = bounds(difference)
    assert low < difference.estimate < high
    mirrored = compare_arms(baseline, ours)
    assert mirrored.verdict == "worse"
    assert mirrored.estimate == pytest.approx(-difference.estimate)


def test_noise_is_not_resolved() -> None:
    first, steps = random_counts(40, seed=1)
    second, _ = random_counts(40, seed=1)
    shuffled = np.random.default_rng(2).permutation(second)
    assert compare_arms(report(first, steps), report(shuffled, steps, arm="baseline")).verdict == "not resolved"


def test_identical_arms_fall_back_to_percentiles_and_say_why() -> None:
    counts = random_counts(20)
    difference = compare_arms(report(*counts), report(*counts, arm="baseline"))
    assert (difference.estimate, difference.low, difference.high, difference.verdict) == (0, 0, 0, "not resolved")
    assert "percentile" in difference.reason


def test_one_prompt_has_no_interval_and_few_have_no_verdict() -> None:
    assert bootstrap_interval(report([5], [10])).low is None
    difference = compare_arms(report([20] * 5, [10] * 5), report([1] * 5, [10] * 5, arm="baseline"))
    assert (difference.verdict, difference.num_prompts) == ("not resolved", 5)
    assert "too few" in difference.reason


def test_prompts_without_a_step_are_left_out() -> None:
    accepted, steps = random_counts(10)
    assert bootstrap_interval(report([*accepted, 0], [*steps, 0])) == bootstrap_interval(report(accepted, steps))
    with pytest.raises(DataError, match="no prompt that both decoded"):
        compare_arms(report([0], [0]), report([1], [1], arm="baseline"))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"k": 5}, "k is 3 for the first and 5 for the second"),
        ({"temperature": 1.0}, "temperature is 0.0 for the first and 1.0 for the second"),
        ({"source": "live"}, "source is replay for the first and live for the second"),
        ({"steps": [10, 10, 10], "accepted": [1, 1, 1]}, "1 rows, such as r2, were measured for one only"),
    ],
)
def test_what_can_not_be_compared_says_what_differs(change: dict[str, Any], says: str) -> None:
    with pytest.raises(Eagle3Error, match=says):
        compare_arms(report([1, 1], [10, 10]), report(**{"accepted": [1, 1], "steps": [10, 10], "arm": "baseline", **change}))


def test_a_hundred_prompts_take_less_than_half_a_second() -> None:
    ours, baseline = report(*random_counts(100)), report(*random_counts(100, seed=1), arm="baseline")
    bootstrap_interval(ours)  # imports scipy
    started = time.process_time()
    compare_arms(ours, baseline)
    assert time.process_time() - started < 0.5
