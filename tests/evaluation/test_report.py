import json

import pytest

from eagle3.errors import DataError
from eagle3.evaluation.report import AcceptanceReport, RowCounts

ROWS = (
    RowCounts("a0", "a", "math", num_steps=4, num_tokens=10, accepted=(4, 2), drafted=(4, 4)),
    RowCounts("a1", "a", "math", num_steps=4, num_tokens=4, accepted=(0, 0), drafted=(4, 3)),
    RowCounts("b0", "b", "chat", num_steps=2, num_tokens=3, accepted=(1, 0), drafted=(2, 1)),
    RowCounts("c0", "c", "", num_steps=0, num_tokens=0, accepted=(0, 0), drafted=(0, 0)),
)
REPORT = AcceptanceReport("ours", k=2, temperature=0.0, source="replay", rows=ROWS, seconds=1.5, notes=("a note",))


def test_the_pooled_acceptance_length_weighs_steps_and_the_other_one_prompts() -> None:
    assert REPORT.acceptance_length == pytest.approx(1 + 7 / 10)
    assert REPORT.acceptance_length_per_prompt == pytest.approx(((1 + 6 / 8) + (1 + 1 / 2)) / 2)  # prompt c has no step


def test_tokens_per_step_counts_only_tokens_in_the_row() -> None:
    assert REPORT.tokens_per_step == pytest.approx(17 / 10)


def test_positions_add_up_to_the_acceptance_length() -> None:
    assert REPORT.acceptance_at == pytest.approx([0.5, 0.2])
    assert 1 + sum(REPORT.acceptance_at) == pytest.approx(REPORT.acceptance_length)


def test_categories_are_reports_of_their_rows() -> None:
    parts = REPORT.by_category()
    assert {name: len(part.rows) for name, part in parts.items()} == {"chat": 1, "math": 2, "uncategorised": 1}
    assert parts["math"].acceptance_length == pytest.approx(1 + 6 / 8)


def test_a_report_survives_json() -> None:
    assert AcceptanceReport.from_dict(json.loads(json.dumps(REPORT.to_dict()))) == REPORT


@pytest.mark.parametrize("average", ["acceptance_length", "acceptance_length_per_prompt", "tokens_per_step", "acceptance_at"])
def test_without_a_step_there_is_no_average(average: str) -> None:
    with pytest.raises(DataError, match=r"No decoding step measured for arm 'ours' \(k=2\)"):
        getattr(REPORT.by_category()["uncategorised"], average)
