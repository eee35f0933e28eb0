"""Live measurements: against a loopback server whose every step is known, and with the faults a real one may have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eagle3.conversation import Row
from eagle3.engines import Sampling
from eagle3.errors import EngineError
from eagle3.evaluation.live import LiveReport, identical_share, measure, read_live, write_live

SAMPLING = Sampling(0.0, 1.0, 64, 256, (2,))


def measured(server: Any, rows: list[Row], *concurrencies: int, k: int = 3) -> list[LiveReport]:
    return measure("ours", k, server.url, "target", rows, SAMPLING, concurrencies, 10)


def steps_of(num_tokens: int, accepts: tuple[int, ...] = (2, 0, 3, 1)) -> tuple[int, int]:
    """(steps, accepted drafts) of an answer of `num_tokens`, by the loopback server's rule."""
    position, steps, accepted = 1, 0, 0
    while position < num_tokens:
        accepted += accepts[steps % 4]
        position += accepts[steps % 4] + 1
        steps += 1
    return steps, accepted


def test_one_request_in_flight_gives_the_counts_of_every_prompt(speculating_server: Callable[..., Any], asked_rows: list[Row]) -> None:
    with speculating_server() as server:
        [report] = measured(server, asked_rows, 1)
    acceptance = report.acceptance(asked_rows)
    assert acceptance is not None and (acceptance.source, acceptance.k, server.max_in_flight) == ("live", 3, 1)
    for row, counts in zip(asked_rows, acceptance.rows, strict=True):
        num_tokens = sum(not masked for masked in row.loss_mask) + 1
        assert (counts.row_id, counts.num_tokens) == (row.id, num_tokens - 1)
        assert (counts.num_steps, counts.num_accepted) == steps_of(num_tokens)
    assert acceptance.acceptance_length == report.counters.acceptance_length
    assert report.tokens_per_step == acceptance.tokens_per_step < acceptance.acceptance_length  # the server counts past the end


def test_more_in_flight_give_the_counters_of_the_pass_and_the_same_answers(speculating_server: Callable[..., Any], asked_rows: list[Row]) -> None:
    with speculating_server() as server:
        one, four = measured(server, asked_rows, 1, 4)
    assert server.max_in_flight == 4
    assert four.acceptance(asked_rows) is None and four.counters_by_row == ()
    assert four.counters == one.counters and four.num_tokens == one.num_tokens
    assert identical_share(four, one) == 1
    assert four.tokens_per_s > 2 * one.tokens_per_s


def test_prompts_go_out_in_order_after_a_warm_up_and_no_pass_helps_the_next(speculating_server: Callable[..., Any], asked_rows: list[Row]) -> None:
    with speculating_server() as server:
        measured(server, asked_rows, 1, 3)
    prompts = [row.input_ids[:-1] for row in asked_rows]
    asked = [body["prompt"] for body in server.bodies]
    assert asked[:2] == prompts[:2] and asked[2:14] == prompts
    assert sorted(asked[14:17]) == prompts[:3] and sorted(asked[17:]) == prompts
    assert all(body["max_tokens"] == 16 for body in server.bodies[:2])
    salts = [body["cache_salt"] for body in server.bodies]
    assert len(set(salts)) == 2 and len(set(salts[:14])) == 1


def test_times_rest_on_ids_and_not_on_chunks(speculating_server: Callable[..., Any], asked_rows: list[Row]) -> None:
    with speculating_server() as server:
        [report] = measured(server, asked_rows, 1)
    assert all(answer.num_first == 1 and 0 < answer.first_s < answer.seconds for answer in report.answers)
    decode_s = sum(answer.seconds - answer.first_s for answer in report.answers)
    assert report.token_s == pytest.approx(decode_s / (report.num_tokens - 12))
    assert report.step_s == pytest.approx(decode_s / report.counters.num_drafts)


def test_a_changed_answer_lowers_the_identical_share(speculating_server: Callable[..., Any], asked_rows: list[Row]) -> None:
    with speculating_server() as plain, speculating_server(drift=1) as other:
        [same], [changed] = measured(plain, asked_rows, 2), measured(other, asked_rows, 2)
    assert identical_share(changed, same) == 0


def test_what_was_measured_is_read_back(speculating_server: Callable[..., Any], asked_rows: list[Row], tmp_path: Path) -> None:
    with speculating_server() as server:
        reports = measured(server, asked_rows, 1, 2)
    write_live(tmp_path, reports)
    assert read_live(tmp_path) == reports


@pytest.mark.parametrize("concurrency", [1, 3])
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("refuse", r"refuses to answer p\d+-0 \(status 400\): .*prompt too long"),
        ("cut", r"broke off the answer to p\d+-0"),
        ("no_ids", "counts .* tokens and streamed .* ids"),
        ("restart", "so it was restarted"),
        ("others", "generated 7 tokens more than were asked for"),
    ],
)
def test_a_measurement_with_a_hole_is_none(speculating_server: Callable[..., Any], asked_rows: list[Row], fault: str, message: str, concurrency: int) -> None:
    with speculating_server(fault) as server, pytest.raises(EngineError, match=message) as caught:
        measured(server, asked_rows, concurrency)
    assert "\n" not in str(caught.value)


def test_a_server_with_another_k_is_refused(speculating_server: Callable[..., Any], asked_rows: list[Row]) -> None:
    with speculating_server() as server, pytest.raises(EngineError, match="drafts 3 tokens per step, not 5"):
        measured(server, asked_rows, 2, k=5)
    with speculating_server() as server, pytest.raises(EngineError, match="drafts 3 tokens per step, not 0"):
        measured(server, asked_rows, 2, k=0)


def test_no_server_is_one_sentence(asked_rows: list[Row]) -> None:
    with pytest.raises(EngineError, match=r"/metrics can't be read"):
        measure("ours", 3, "http://127.0.0.1:9/v1", "target", asked_rows, SAMPLING, [1], 10)
