"""What a run leaves for people and for other runs: `results.json` with the summary, `acceptance.json` with every row's counts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypedDict, cast

from eagle3.errors import DataError
from eagle3.evaluation.live import LiveReport, identical_share
from eagle3.evaluation.report import AcceptanceReport
from eagle3.evaluation.speed import best_ks, compare_speed, expect
from eagle3.evaluation.statistics import bootstrap_interval, compare_arms
from eagle3.store import write_json

RESULTS_FILE = "results.json"
ACCEPTANCE_FILE = "acceptance.json"


class ArmSummary(TypedDict):
    """One arm at one k, without its rows."""

    arm: str
    source: str  # "replay" or "live"
    k: int
    temperature: float
    acceptance_length: float  # pooled over steps
    interval: tuple[float | None, float | None]  # 95 %, of the pooled one
    interval_method: str  # "bca", "percentile" or "none"
    acceptance_length_per_prompt: float
    tokens_per_step: float
    acceptance_at: list[float]
    rows: int
    steps: int
    tokens: int
    seconds: float
    by_category: dict[str, float]  # pooled acceptance length
    notes: list[str]


class SpeedSummary(TypedDict):
    """One arm on a live server at one k and one number of requests in flight."""

    arm: str  # "none" is the target without speculation
    k: int  # 0 without speculation
    concurrency: int
    temperature: float
    requests: int
    tokens: int
    seconds: float
    tokens_per_s: float
    first_s: float  # mean time to the first token
    token_s: float | None  # per token behind it
    acceptance_length: float | None  # 1 + accepted / drafts, by the server's counters: of `ngram` only the steps that proposed something
    tokens_per_step: float | None  # over all steps, comparable between arms
    speed_up: dict[str, Any] | None  # speed.SpeedUp as a dict; None for the target alone, or where it was not measured
    identical: float | None  # greedy only: share of answers with the same ids as the target alone, whose own are held against its fewest in flight


class StageSummary(TypedDict):
    """One stage's artifact and what it cost when it was made."""

    stage: str
    split: str  # "train", "eval" or ""
    status: str  # "made" in this run, or "cached" from an earlier one
    seconds: float
    tokens: int
    bytes: int
    signature: str


class Results(TypedDict):
    """The whole of `results.json`."""

    k: int  # the one the run was asked for; the arms may hold more
    arms: list[ArmSummary]
    differences: list[dict[str, Any]]  # statistics.Difference as dicts
    stages: list[StageSummary]
    drafter: str  # its folder
    vocabulary_coverage: float  # share of held-out answer tokens that the draft vocabulary holds, 0..1
    live: list[SpeedSummary]
    expected: list[dict[str, Any]]  # speed.Expectation as dicts
    best_k: dict[str, int]  # of our drafter, by requests in flight, the k of which the most speed is expected
    published: dict[str, Any]  # of the baseline, by others: arm, figures by test set, source; empty when there are none


def summarise(report: AcceptanceReport) -> ArmSummary:
    """The numbers of one report that tables and pages show."""
    interval = bootstrap_interval(report)
    return ArmSummary(
        arm=report.arm,
        source=report.source,
        k=report.k,
        temperature=report.temperature,
        acceptance_length=report.acceptance_length,
        interval=(interval.low, interval.high),
        interval_method=interval.method,
        acceptance_length_per_prompt=report.acceptance_length_per_prompt,
        tokens_per_step=report.tokens_per_step,
        acceptance_at=report.acceptance_at,
        rows=len(report.rows),
        steps=report.num_steps,
        tokens=report.num_tokens,
        seconds=report.seconds,
        by_category={name: part.acceptance_length for name, part in report.by_category().items() if part.num_steps},
        notes=list(report.notes),
    )


def collect_results(
    reports: Sequence[AcceptanceReport],
    ours: str,
    k: int,
    stages: Sequence[StageSummary],
    drafter: str,
    vocabulary_coverage: float,
    live: Sequence[LiveReport] = (),
    published: Mapping[str, Any] | None = None,
) -> Results:
    """Summaries of all reports, and the difference of arm `ours` to each other arm measured in the same way at the same k and temperature.

    Args:
        live: passes of live servers; what they tell of acceptance prompt by prompt is among `reports`.
        published: what others say of the baseline.
    """
    expected = expect(reports, live)
    pairs = [
        (mine, other)
        for mine in reports
        for other in reports
        if mine.arm == ours and other.arm != ours and (mine.k, mine.temperature, mine.source) == (other.k, other.temperature, other.source)
    ]
    return Results(
        k=k,
        arms=[summarise(report) for report in reports],
        differences=[asdict(compare_arms(mine, other)) for mine, other in pairs],
        stages=list(stages),
        drafter=drafter,
        vocabulary_coverage=vocabulary_coverage,
        live=summarise_live(live),
        expected=[asdict(expectation) for expectation in expected],
        best_k={str(concurrency): best for concurrency, best in best_ks(expected, ours).items()},
        published=dict(published or {}),
    )


def summarise_live(reports: Sequence[LiveReport]) -> list[SpeedSummary]:
    """Figures of each pass, beside the target alone with as many requests in flight.

    Rounding, too, changes greedy answers: how many tokens are computed together decides ties in bfloat16. The target alone, held against itself with
    the fewest in flight, shows how many without any speculation.
    """
    alone = {report.concurrency: report for report in reports if not report.k}
    fewest = alone[min(alone)] if alone else None
    found = []
    for report in reports:
        plain = alone.get(report.concurrency) if report.k else fewest
        found.append(_summarise_pass(report, plain if plain is not report else None))
    return found


def _summarise_pass(report: LiveReport, plain: LiveReport | None) -> SpeedSummary:
    return SpeedSummary(
        arm=report.arm,
        k=report.k,
        concurrency=report.concurrency,
        temperature=report.temperature,
        requests=len(report.answers),
        tokens=report.num_tokens,
        seconds=report.seconds,
        tokens_per_s=report.tokens_per_s,
        first_s=report.mean_first_s,
        token_s=report.token_s,
        acceptance_length=report.counters.acceptance_length,
        tokens_per_step=report.tokens_per_step,
        speed_up=asdict(compare_speed(report, plain)) if plain and report.k else None,
        identical=identical_share(report, plain) if plain and not report.temperature else None,
    )


def write_results(folder: Path, results: Results, reports: Sequence[AcceptanceReport]) -> None:
    """Writes both files, each by rename and `results.json` last, so that its presence means both are whole."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / ACCEPTANCE_FILE, [report.to_dict() for report in reports])
    write_json(folder / RESULTS_FILE, results)


def read_results(folder: Path) -> Results:
    """The summary of a run folder; raises DataError where there is none."""
    return cast(Results, _read_json(folder / RESULTS_FILE))


def read_reports(folder: Path) -> list[AcceptanceReport]:
    """The full reports of a run folder; raises DataError where there are none."""
    return [AcceptanceReport.from_dict(report) for report in _read_json(folder / ACCEPTANCE_FILE)]


def published_line(published: Mapping[str, Any]) -> str:
    """What others say of the baseline, in words that keep it apart from what was measured."""
    figures = ", ".join(f"{name} {figure:.3f}" for name, figure in published["figures"].items())
    return f"published for {published['arm']}, on other prompts and not measured here: {figures} ({published['source']})"


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise DataError(f"No {path.name} in {path.parent}: the run has not finished its evaluation; run it with until=evaluate.") from error
    except ValueError as error:
        raise DataError(f"{path} is not valid JSON ({error}): evaluate the run again.") from error
