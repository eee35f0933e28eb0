import json
from dataclasses import replace
from pathlib import Path

import pytest

from eagle3.comparison.results import RESULTS_FILE, Results, collect_results, read_reports, read_results, summarise_live, write_results
from eagle3.errors import DataError
from eagle3.evaluation.live import LiveReport
from eagle3.evaluation.report import AcceptanceReport, RowCounts
from eagle3.evaluation.streaming import TimedAnswer
from eagle3.serving.metrics import Counters


def report(arm: str, k: int, gain: int = 0) -> AcceptanceReport:
    rows = tuple(
        RowCounts(f"r{index}", f"p{index}", "math" if index % 2 else "chat", 20, 20 + 12 + index + gain, (12 + index + gain, *[0] * (k - 1)), (20,) * k)
        for index in range(8)
    )
    return AcceptanceReport(arm, k, 0.0, "replay", rows, 1.0)


@pytest.fixture
def reports() -> list[AcceptanceReport]:
    return [report("ours", 3, gain=4), report("ours", 5, gain=4), report("ngram", 3), report("baseline", 3)]


def collect(reports: list[AcceptanceReport]) -> Results:
    return collect_results(reports, ours="ours", k=3, stages=[], drafter="store/train/abc", vocabulary_coverage=0.98)


def test_ours_is_compared_with_every_arm_of_the_same_k(reports: list[AcceptanceReport]) -> None:
    results = collect(reports)
    assert [(d["ours"], d["baseline"], d["k"], d["verdict"]) for d in results["differences"]] == [
        ("ours", "ngram", 3, "better"),
        ("ours", "baseline", 3, "better"),
    ]


def test_a_summary_repeats_the_report(reports: list[AcceptanceReport]) -> None:
    summary = collect(reports)["arms"][0]
    assert summary["acceptance_length"] == reports[0].acceptance_length
    assert summary["acceptance_length_per_prompt"] == reports[0].acceptance_length_per_prompt
    assert summary["by_category"] == {name: part.acceptance_length for name, part in reports[0].by_category().items()}
    assert (summary["rows"], summary["steps"], summary["tokens"]) == (8, 160, reports[0].num_tokens)


def test_written_results_are_read_back(tmp_path: Path, reports: list[AcceptanceReport]) -> None:
    write_results(tmp_path / "run", collect(reports), reports)
    assert read_results(tmp_path / "run") == json.loads(json.dumps(collect(reports)))
    assert read_reports(tmp_path / "run") == reports
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["acceptance.json", "results.json"]


def test_a_failed_write_leaves_the_old_results(tmp_path: Path, reports: list[AcceptanceReport]) -> None:
    write_results(tmp_path, collect(reports), reports)
    before = (tmp_path / RESULTS_FILE).read_bytes()
    broken = collect(reports)
    broken["vocabulary_coverage"] = float("nan")
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_results(tmp_path, broken, reports)
    assert (tmp_path / RESULTS_FILE).read_bytes() == before


def test_missing_and_damaged_results_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has not finished its evaluation"):
        read_results(tmp_path)
    (tmp_path / RESULTS_FILE).write_text("{")
    with pytest.raises(DataError, match="not valid JSON"):
        read_results(tmp_path)


def test_the_target_alone_shows_what_rounding_changes(live_results: Results) -> None:
    """Its pass with more in flight is held against its own with the fewest; a speculating arm against the target alone with as many."""
    assert [line["identical"] for line in live_results["live"]] == [None, 1.0]
    plain = LiveReport("none", 0, 1, 0.0, (TimedAnswer("a-0", "a", (1, 2, 3), 0.1, 1, 0.2), TimedAnswer("b-0", "b", (4, 5), 0.1, 1, 0.2)), Counters(), (), 0.4)
    changed = (plain.answers[0], replace(plain.answers[1], completion_ids=(4, 6)))
    busy = replace(plain, concurrency=8, answers=changed)
    ours = replace(busy, arm="ours", k=3, counters=Counters(5, 3, 9, 0, (0, 0, 0)))
    found = summarise_live([plain, busy, ours])
    assert [line["identical"] for line in found] == [None, 0.5, 1.0]
    assert [line["speed_up"] is None for line in found] == [True, True, False]
