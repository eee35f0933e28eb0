"""Counters of pages that real servers showed: SmolLM2 on the CPU without speculation, with `ngram` and with an untrained drafter (vLLM 0.32, k=3)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from eagle3.errors import EngineError
from eagle3.serving.metrics import Counters, metrics_url, read_counters

PAGES = Path(__file__).parent / "metrics"


def page(name: str) -> str:
    return (PAGES / f"{name}.txt").read_text()


def test_the_page_of_a_drafter_gives_its_counts_by_position() -> None:
    counters = read_counters(page("eagle3"))
    assert (counters.num_generated, counters.num_drafts, counters.num_draft_tokens) == (672, 650, 1950)
    assert counters.accepted_at == (4, 0, 0) and counters.num_accepted == 4
    assert counters.acceptance_length == 1 + 4 / 650


def test_prompt_lookup_counts_only_the_steps_in_which_it_proposed() -> None:
    counters = read_counters(page("ngram"))
    assert sum(counters.accepted_at) == counters.num_accepted
    assert counters.num_drafts < counters.num_generated - counters.num_accepted


def test_a_server_that_does_not_speculate_has_no_acceptance() -> None:
    counters = read_counters(page("none"))
    assert counters.num_generated and counters.accepted_at == () and counters.acceptance_length is None


def test_the_engines_of_one_server_are_added_up() -> None:
    one = page("eagle3")
    second = "\n".join(line.replace('engine="0"', 'engine="1"') for line in one.splitlines() if not line.startswith("#"))
    both = read_counters(f"{one}{second}\n")
    assert both.num_drafts == 2 * 650 and both.accepted_at == (8, 0, 0)


def test_two_readings_give_what_was_counted_between_them() -> None:
    before = read_counters(page("eagle3"))
    after = replace(before, num_drafts=660, num_generated=700, num_accepted=14, accepted_at=(9, 3, 2))
    between = after.since(before)
    assert (between.num_drafts, between.num_generated, between.num_accepted, between.accepted_at) == (10, 28, 10, (5, 3, 2))
    assert before.since(before) == Counters(accepted_at=(0, 0, 0), created=before.created)


def test_a_restart_is_noticed_and_never_a_negative_number() -> None:
    before = Counters(num_generated=100, num_drafts=50, created=1.0)
    for after in (Counters(num_generated=20, num_drafts=10, created=1.0), replace(before, num_generated=900, num_drafts=400, created=2.0)):
        with pytest.raises(EngineError, match="so it was restarted"):
            after.since(before)


@pytest.mark.parametrize("text", ["<html>not found</html>", "", "# TYPE sglang_tokens counter\nsglang_tokens_total 3\n"])
def test_the_page_of_another_server_is_refused(text: str) -> None:
    with pytest.raises(EngineError, match="/metrics page"):
        read_counters(text)


def test_metrics_lie_beside_the_api() -> None:
    assert metrics_url("http://127.0.0.1:8000/v1") == "http://127.0.0.1:8000/metrics"
