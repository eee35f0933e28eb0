"""Error bars: acceptance lengths and their differences, resampled by prompt.

Prompts are the independent units (tokens of one answer are not), so whole prompts are drawn, and both arms of a comparison with the same draw.
Intervals are 95 % bias-corrected and accelerated bootstrap intervals (Efron 1987; scipy.stats.bootstrap).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from eagle3.errors import DataError, Eagle3Error
from eagle3.evaluation.report import AcceptanceReport

NUM_RESAMPLES = 2000
CONFIDENCE = 0.95
SEED = 20_250_303  # fixed, so that the same counts always give the same interval
MIN_PROMPTS = 6  # with fewer, even prompts that all agree fail a two-sided sign test at 5 % (2 * 0.5**5 > 0.05)

Samples = tuple[npt.NDArray[np.float64], ...]


@dataclass(frozen=True)
class Interval:
    """A 95 % interval, or none (`low` and `high` None); `reason` says why it is not the usual one."""

    low: float | None
    high: float | None
    method: str  # "bca", "percentile" or "none"
    reason: str = ""


@dataclass(frozen=True)
class Difference:
    """How much longer ours is accepted than the baseline, in tokens per step, paired by prompt."""

    ours: str
    baseline: str
    k: int
    temperature: float
    source: str
    estimate: float
    low: float | None
    high: float | None
    verdict: str  # "better", "worse" or "not resolved"
    num_prompts: int
    reason: str = ""
    prompts_needed: int | None = None  # about so many would resolve it, if it is not


def bootstrap_interval(report: AcceptanceReport) -> Interval:
    """The interval of the pooled acceptance length over prompts."""
    counts = _counts_by_prompt(report)
    return resampled_interval(tuple(np.array(column, dtype=np.float64) for column in zip(*counts.values(), strict=True)), _acceptance_length)


def compare_arms(ours: AcceptanceReport, baseline: AcceptanceReport) -> Difference:
    """The difference of pooled acceptance lengths over the prompts that both arms decoded, with its interval.

    Raises Eagle3Error, saying what differs, unless both measured the same rows in the same way at the same k and temperature.
    """
    _check_comparable(ours, baseline)
    our_counts, base_counts = _counts_by_prompt(ours), _counts_by_prompt(baseline)
    prompts = [prompt for prompt in our_counts if prompt in base_counts]
    if not prompts:
        raise DataError(f"Arms {ours.arm!r} and {baseline.arm!r} have no prompt that both decoded: nothing to compare.")
    samples = tuple(np.array(column, dtype=np.float64) for column in zip(*(our_counts[p] + base_counts[p] for p in prompts), strict=True))
    interval = resampled_interval(samples, _length_difference)
    estimate = float(_length_difference(*samples))
    verdict, reason = judge(interval, len(prompts))
    return Difference(
        ours=ours.arm,
        baseline=baseline.arm,
        k=ours.k,
        temperature=ours.temperature,
        source=ours.source,
        estimate=estimate,
        low=interval.low,
        high=interval.high,
        verdict=verdict,
        num_prompts=len(prompts),
        reason=reason,
        prompts_needed=prompts_needed(estimate, interval, len(prompts)),
    )


def _check_comparable(ours: AcceptanceReport, baseline: AcceptanceReport) -> None:
    for name in ("k", "temperature", "source"):
        mine, theirs = getattr(ours, name), getattr(baseline, name)
        if mine != theirs:
            raise Eagle3Error(f"Arms {ours.arm!r} and {baseline.arm!r} can't be compared: {name} is {mine} for the first and {theirs} for the second.")
    unshared = {row.row_id for row in ours.rows} ^ {row.row_id for row in baseline.rows}
    if unshared:
        example = min(unshared)
        raise Eagle3Error(f"Arms {ours.arm!r} and {baseline.arm!r} can't be compared: {len(unshared)} rows, such as {example}, were measured for one only.")


def judge(interval: Interval, num_prompts: int, neutral: float = 0.0) -> tuple[str, str]:
    """A verdict on what is better the larger it is, and what is to be said about it: "better" or "worse" only if the interval lies off `neutral`."""
    if interval.low is None or interval.high is None or num_prompts < MIN_PROMPTS:
        return "not resolved", f"{num_prompts} prompts are too few for a verdict (at least {MIN_PROMPTS})"
    if interval.low > neutral:
        return "better", interval.reason
    return ("worse" if interval.high < neutral else "not resolved"), interval.reason


def prompts_needed(estimate: float, interval: Interval, num_prompts: int, neutral: float = 0.0) -> int | None:
    """About how many prompts like these would move the interval off `neutral`, if the estimate stays: its width falls with the root of their number.

    None when it lies off already, or when there is no difference or no interval to go by.
    """
    if interval.low is None or interval.high is None or estimate == neutral or not interval.low <= neutral <= interval.high:
        return None
    reach = estimate - interval.low if estimate > neutral else interval.high - estimate
    return max(MIN_PROMPTS, num_prompts + 1, math.ceil(num_prompts * (reach / (estimate - neutral)) ** 2))


def _counts_by_prompt(report: AcceptanceReport) -> dict[str, tuple[int, int]]:
    """(accepted, steps) of each prompt that has a step, all its rows together."""
    counts: dict[str, tuple[int, int]] = {}
    for row in report.rows:
        accepted, steps = counts.get(row.prompt_id, (0, 0))
        counts[row.prompt_id] = (accepted + row.num_accepted, steps + row.num_steps)
    return {prompt: count for prompt, count in counts.items() if count[1]}


def _acceptance_length(accepted: npt.NDArray[np.float64], steps: npt.NDArray[np.float64], *, axis: int = -1) -> Any:
    return 1 + accepted.sum(axis=axis) / steps.sum(axis=axis)


def _length_difference(
    our_accepted: npt.NDArray[np.float64],
    our_steps: npt.NDArray[np.float64],
    base_accepted: npt.NDArray[np.float64],
    base_steps: npt.NDArray[np.float64],
    *,
    axis: int = -1,
) -> Any:
    return _acceptance_length(our_accepted, our_steps, axis=axis) - _acceptance_length(base_accepted, base_steps, axis=axis)


def resampled_interval(samples: Samples, statistic: Callable[..., Any]) -> Interval:
    """Bootstraps a statistic of columns [num_prompts], drawing the same prompts from each column."""
    if not samples or len(samples[0]) < 2:
        return Interval(None, None, "none", "fewer than two prompts: nothing to resample")
    from scipy.stats import bootstrap

    for method in ("bca", "percentile"):
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")  # scipy warns about degenerate data; the nan it returns says the same and is handled below
            low, high = bootstrap(
                samples,
                statistic,
                n_resamples=NUM_RESAMPLES,
                confidence_level=CONFIDENCE,
                method=method,
                vectorized=True,
                paired=True,
                rng=np.random.default_rng(SEED),
            ).confidence_interval
        if np.isfinite(low) and np.isfinite(high):
            break
    reason = "" if method == "bca" else "the resamples are too alike for bias correction: percentile interval"
    return Interval(float(low), float(high), method, reason)
