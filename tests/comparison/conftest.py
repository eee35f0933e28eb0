import numpy as np
import pytest

from eagle3.comparison.results import Results, StageSummary, collect_results
from eagle3.evaluation.live import LiveReport
from eagle3.evaluation.report import AcceptanceReport, RowCounts
from eagle3.evaluation.streaming import TimedAnswer
from eagle3.serving.metrics import Counters

NUM_STEPS = 40


def simulated_report(arm: str, k: int, rates: tuple[float, ...], source: str = "replay", seed: int = 0) -> AcceptanceReport:
    """Rows whose steps accept position i with the falling probability rates[i]."""
    rng = np.random.default_rng(seed)
    rows = []
    for index in range(30):
        reached = rng.random(NUM_STEPS)
        accepted = tuple(int((reached < rate).sum()) for rate in rates[:k])
        rows.append(RowCounts(f"r{index}", f"p{index}", "math" if index % 2 else "chat", NUM_STEPS, NUM_STEPS + sum(accepted), accepted, (NUM_STEPS,) * k))
    return AcceptanceReport(arm, k, 0.0, source, tuple(rows), 12.5)


@pytest.fixture
def results() -> Results:
    drafter, published, lookup = (0.71, 0.45, 0.27, 0.17, 0.1), (0.58, 0.31, 0.17, 0.09, 0.05), (0.28, 0.15, 0.08, 0.05, 0.03)
    reports = [simulated_report("ours", k, drafter) for k in (1, 3, 5)]
    reports += [simulated_report("baseline", 3, published, seed=1), simulated_report("ngram", 3, lookup, seed=2)]
    reports += [simulated_report("ours", 3, drafter, "live", seed=3)]
    stages = [
        StageSummary(stage="generate", split="train", status="cached", seconds=4021.4, tokens=144_000, bytes=5_300_000, signature="0123456789abcdef"),
        StageSummary(stage="train", split="", status="made", seconds=660.0, tokens=1_152_000, bytes=73_000_000, signature="fedcba9876543210"),
    ]
    return collect_results(reports, ours="ours", k=3, stages=stages, drafter="store/train/fedcba9876543210", vocabulary_coverage=0.981)


@pytest.fixture
def live_results() -> Results:
    """The target alone at 50 tokens/s, and ours at 1.6 times as many: two tokens a step that takes a fourth longer."""
    passes = []
    for arm, k, tokens_per_step, step_s in (("none", 0, 1, 0.02), ("ours", 3, 2, 0.025)):
        steps = 100 // tokens_per_step
        answers = tuple(TimedAnswer(f"p{i}-0", f"p{i}", tuple(range(101)), step_s, 1, step_s * (steps + tokens_per_step**-1)) for i in range(8))
        counters = Counters(808, 8 * steps if k else 0, 8 * k * steps, 8 * (100 - steps), (8 * (100 - steps), 0, 0)[:k])
        passes.append(LiveReport(arm, k, 1, 0.0, answers, counters, (), sum(answer.seconds for answer in answers)))
    rows = tuple(RowCounts(f"p{i}-0", f"p{i}", "", 50, 100, (50, 0, 0), (50, 50, 50)) for i in range(8))
    reports = [AcceptanceReport("ours", 3, 0.0, "replay", rows, 1.0)]
    published = {"arm": "theirs", "figures": {"GSM8K": 3.165}, "source": "a model card"}
    return collect_results(reports, "ours", 3, [], "drafter", 1.0, passes, published)
