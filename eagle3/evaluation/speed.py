"""What speculation gains in time: measured against the target alone, and expected at every k from replayed acceptance and the cost of a step.

A request's seconds are n decoding tokens at so many tokens per step and seconds per step, behind the time to the first token. A step with k drafts
costs a verification and k draft steps; both grow with k, so the measured seconds per step are fitted by a line in k, for each number in flight.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from eagle3.errors import DataError
from eagle3.evaluation.live import LiveReport
from eagle3.evaluation.report import AcceptanceReport
from eagle3.evaluation.statistics import judge, prompts_needed, resampled_interval


@dataclass(frozen=True)
class SpeedUp:
    """How much faster an arm answers than the target alone (1 is no gain), with a 95 % interval over prompts.

    The interval says how much the prompts vary. The machine's own moods between two servers are not in it.
    """

    arm: str
    k: int
    concurrency: int
    estimate: float
    low: float | None
    high: float | None
    verdict: str  # "better", "worse" or "not resolved"
    num_prompts: int
    reason: str
    prompts_needed: int | None  # about so many would resolve it, if it is not


@dataclass(frozen=True)
class StepCost:
    """Seconds of one decoding step with k drafts: `base_s` + k * `draft_s`; fitted to `num_points` measured k."""

    base_s: float
    draft_s: float
    num_points: int

    def at(self, k: int) -> float:
        return self.base_s + k * self.draft_s


@dataclass(frozen=True)
class Expectation:
    """The speed-up to be expected of an arm at one k and concurrency, and the measured one where there is one."""

    arm: str
    k: int
    concurrency: int
    expected: float
    measured: float | None


def compare_speed(report: LiveReport, plain: LiveReport) -> SpeedUp:
    """The speed-up over the target alone: tokens per second of waiting, all requests together, prompts resampled in pairs.

    Raises:
        DataError: the two did not answer the same prompts with the same number in flight.
    """
    ours, theirs = _by_prompt(report), _by_prompt(plain)
    if report.concurrency != plain.concurrency or list(ours) != list(theirs):
        raise DataError(f"Arm {report.arm!r} and the target alone can't be compared: they did not answer the same prompts with the same number in flight.")
    samples = tuple(np.array(column, dtype=np.float64) for column in zip(*(ours[prompt] + theirs[prompt] for prompt in ours), strict=True))
    interval = resampled_interval(samples, _ratio)
    estimate = float(_ratio(*samples))
    verdict, reason = judge(interval, len(ours), neutral=1.0)
    needed = prompts_needed(estimate, interval, len(ours), neutral=1.0)
    return SpeedUp(report.arm, report.k, report.concurrency, estimate, interval.low, interval.high, verdict, len(ours), reason, needed)


def fit_step_cost(reports: Sequence[LiveReport], plain: LiveReport) -> StepCost | None:
    """The cost of a step of one arm at one concurrency, by least squares; where one k was measured, the target alone is the point at k = 0.

    None when nothing was decoded.
    """
    points = {report.k: report.step_s for report in reports}
    if len(points) == 1:
        points[0] = plain.step_s
    known = {k: step_s for k, step_s in points.items() if step_s is not None}
    if len(known) < 2:
        return None
    draft_s, base_s = np.polyfit(list(known), list(known.values()), 1)
    if draft_s < 0:  # a draft costs something: what looks like a gain is noise
        draft_s, base_s = 0.0, np.mean(list(known.values()))
    return StepCost(float(base_s), float(draft_s), len(known))


def expect(replays: Sequence[AcceptanceReport], live: Sequence[LiveReport]) -> list[Expectation]:
    """The expected speed-up of every arm that was replayed and measured, at every replayed k and every concurrency."""
    plain = {report.concurrency: report for report in live if not report.k}
    measured: defaultdict[tuple[str, int], list[LiveReport]] = defaultdict(list)
    for report in live:
        if report.k and report.concurrency in plain:
            measured[report.arm, report.concurrency].append(report)
    found = []
    for (arm, concurrency), reports in measured.items():
        alone = plain[concurrency]
        cost, alone_s = fit_step_cost(reports, alone), alone.step_s
        if cost is None or alone_s is None:
            continue
        speed_ups = {report.k: compare_speed(report, alone).estimate for report in reports}
        num_tokens = alone.num_tokens / len(alone.answers) - 1
        for replay in replays:
            if replay.arm == arm and replay.source == "replay":
                seconds = alone.mean_first_s + num_tokens / replay.tokens_per_step * cost.at(replay.k)
                expected = (alone.mean_first_s + num_tokens * alone_s) / seconds
                found.append(Expectation(arm, replay.k, concurrency, expected, speed_ups.get(replay.k)))
    return found


def best_ks(expectations: Sequence[Expectation], arm: str) -> dict[int, int]:
    """For each concurrency the k of which the most is to be expected."""
    best: dict[int, Expectation] = {}
    for one in expectations:
        if one.arm == arm and (one.concurrency not in best or one.expected > best[one.concurrency].expected):
            best[one.concurrency] = one
    return {concurrency: one.k for concurrency, one in best.items()}


def _by_prompt(report: LiveReport) -> dict[str, tuple[float, float]]:
    """(tokens, seconds) of each prompt, all its turns together."""
    sums: dict[str, tuple[float, float]] = {}
    for answer in report.answers:
        tokens, seconds = sums.get(answer.prompt_id, (0.0, 0.0))
        sums[answer.prompt_id] = (tokens + answer.num_tokens, seconds + answer.seconds)
    return sums


def _ratio(
    our_tokens: npt.NDArray[np.float64],
    our_seconds: npt.NDArray[np.float64],
    tokens: npt.NDArray[np.float64],
    seconds: npt.NDArray[np.float64],
    *,
    axis: int = -1,
) -> Any:
    return our_tokens.sum(axis=axis) / our_seconds.sum(axis=axis) * seconds.sum(axis=axis) / tokens.sum(axis=axis)
