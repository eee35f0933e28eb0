"""Which arms are measured live, and one vLLM server after another for them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from eagle3.config import BaselineConfig, EvaluationConfig
from eagle3.conversation import Row
from eagle3.engines import Sampling
from eagle3.evaluation.live import LiveReport, measure
from eagle3.progress import progress
from eagle3.serving.speculation import Speculation

log = logging.getLogger(__name__)

PLAIN, NGRAM, OURS = "none", "ngram", "ours"


@dataclass(frozen=True)
class Arm:
    """One way to serve the target: its name in tables, its key in `evaluation.live_arms`, and how it drafts, if it does."""

    name: str
    key: str
    speculation: Speculation | None

    @property
    def k(self) -> int:
        return self.speculation.k if self.speculation else 0

    def __str__(self) -> str:
        return f"{self.name}, k={self.k}" if self.speculation else "no speculation"


def live_arms(evaluation: EvaluationConfig, baseline: BaselineConfig, ours: Path, theirs: Path | None) -> list[Arm]:
    """The arms of `evaluation.live_arms` at each k, the target without speculation first.

    Args:
        ours, theirs: the folders of our drafter and of the baseline's, if that is one.
    """
    ks = evaluation.live_ks or [evaluation.k]
    chosen = evaluation.live_arms
    arms = [Arm(PLAIN, "none", None)] if "none" in chosen else []
    if "ngram" in chosen or ("baseline" in chosen and baseline.name == NGRAM):
        arms += [Arm(NGRAM, "ngram", Speculation(k, min_n=baseline.min_n, max_n=baseline.max_n)) for k in ks]
    if "baseline" in chosen and theirs is not None:
        arms += [Arm(baseline.name, "baseline", Speculation(k, theirs)) for k in ks]
    if "ours" in chosen:
        arms += [Arm(OURS, "ours", Speculation(k, ours)) for k in ks]
    return arms


def measure_arms(
    arms: Sequence[Arm],
    serve: Callable[[Arm], AbstractContextManager[str]],
    model: str,
    rows: Sequence[Row],
    sampling: Sampling,
    concurrencies: Sequence[int],
    timeout_s: float,
) -> list[LiveReport]:
    """Measure all arms on the same prompts, one server at a time, so that no arm takes the machine from another.

    Args:
        serve: a context that yields the base URL of a server for one arm.
        model: the name the servers give the target.

    Raises:
        EngineError: a server does not start, or a measurement has a hole.
    """
    reports: list[LiveReport] = []
    with progress("live", len(arms), "arms") as update:
        for done, arm in enumerate(arms, 1):
            with serve(arm) as base_url:
                measured = measure(arm.name, arm.k, base_url, model, rows, sampling, concurrencies, timeout_s)
            update(done, str(arm))
            for report in measured:
                log.info("live: %s, %d in flight: %.1f tokens/s", arm, report.concurrency, report.tokens_per_s)
            reports += measured
    return reports
