"""The client of live servers, against a server on the loopback that answers as vLLM does and fails on purpose."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from eagle3.conversation import Answer, Failure, Request, encode_turn, to_row
from eagle3.engines import Sampling, fleet, openai
from eagle3.engines.openai import OpenAIEngine
from eagle3.errors import EngineError
from tests.loopback import CLOSE, END, FAULTS, THINK, KimiTokenizer, Loopback, Reply, kimi

TOKENIZER = KimiTokenizer()


@pytest.fixture(autouse=True)
def _in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai, "BACKOFF_S", 0.01)
    monkeypatch.setattr(fleet, "TRY_AGAIN_S", 0.2)
    monkeypatch.setattr(fleet, "START_PATIENCE_S", 1.0)


def _engine(*servers: Loopback | str, sampling: Sampling = Sampling(), **options: Any) -> OpenAIEngine:  # noqa: B008 (frozen)
    urls = [server if isinstance(server, str) else server.url for server in servers]
    return OpenAIEngine(urls, "target", sampling, TOKENIZER, **{"concurrency": 8, "timeout_s": 5.0, **options})


def _requests(num: int) -> Iterator[Request]:
    for i in range(num):
        messages = ({"role": "user", "content": f"question {i}"},)
        yield Request(f"p{i}", 0, encode_turn(TOKENIZER, messages), messages)


def _run(engine: OpenAIEngine, requests: Iterable[Request]) -> list[Answer | Failure]:
    async def collect() -> list[Answer | Failure]:
        return [outcome async for outcome in engine.answer(requests)]

    return asyncio.run(collect())


def _only(engine: OpenAIEngine) -> Any:
    (outcome,) = _run(engine, _requests(1))
    return outcome


def test_exactly_so_many_requests_are_in_flight_and_no_more_are_taken() -> None:
    taken = 0

    def counted() -> Iterator[Request]:
        nonlocal taken
        for request in _requests(200):
            taken += 1
            yield request

    async def run(engine: OpenAIEngine) -> None:
        seen = 0
        async for _ in engine.answer(counted()):
            seen += 1
            assert taken <= seen + 2 * 16  # in flight, or waiting to be read: however many prompts there are
        assert seen == 200

    with Loopback(delay_s=0.1) as server:
        asyncio.run(run(_engine(server, concurrency=16)))
        assert server.max_in_flight == 16
    with Loopback(delay_s=4.0) as server:
        _run(_engine(server, concurrency=300, timeout_s=60), _requests(300))
        assert server.max_in_flight == 300


def test_servers_share_the_load_fairly_and_a_slow_one_gets_less() -> None:
    with Loopback(delay_s=0.02) as one, Loopback(delay_s=0.02) as two, Loopback(delay_s=0.5) as slow:
        _run(_engine(one, two), _requests(200))
        assert abs(one.num_requests - two.num_requests) <= 10
        before = one.num_requests
        _run(_engine(one, slow), _requests(200))
        assert slow.num_requests < 0.3 * (one.num_requests - before)


def test_every_prompt_ends_in_one_outcome_whatever_the_server_does() -> None:
    with Loopback(fault_rate=0.05) as server:
        outcomes = _run(_engine(server, concurrency=64, timeout_s=0.5), _requests(1500))
        assert set(server.injected) == set(FAULTS)
    assert Counter(outcome.prompt_id for outcome in outcomes) == Counter(f"p{i}" for i in range(1500))
    assert all(isinstance(outcome, Answer) for outcome in outcomes)


@pytest.mark.parametrize(
    ("fault", "kind", "num_attempts"),
    [
        ("hang", "timeout", 3),
        ("reset", "connection", 3),
        ("429", "http_429", 3),
        ("500", "http_500", 3),
        ("503", "http_503", 3),
        ("bad_json", "bad_json", 3),
        ("empty", "empty", 3),
        ("400", "http_400", 1),
        ("422", "http_422", 1),
    ],
)
def test_each_fault_has_a_name_and_only_those_that_may_pass_are_tried_again(fault: str, kind: str, num_attempts: int) -> None:
    with Loopback(fault=lambda _: fault) as server:
        failure = _only(_engine(server, max_retries=2, timeout_s=0.3))
        assert server.num_requests == num_attempts
    assert isinstance(failure, Failure) and failure.kind == kind
    if kind.startswith("http"):
        assert "injected" in failure.message or "too many requests" in failure.message


def test_a_server_that_asks_for_patience_gets_it() -> None:
    with Loopback(fault=lambda number: "429" if number == 0 else None) as server:
        began = time.monotonic()
        assert isinstance(_only(_engine(server)), Answer)
        assert time.monotonic() - began >= 0.05


@pytest.mark.parametrize(("header", "seconds"), [("7", 7.0), ("-1", 0.0), ("1e9", openai.MAX_RETRY_AFTER_S), ("soon", None), (None, None)])
def test_retry_after_is_read_in_both_forms_and_never_longer_than_is_sane(header: str | None, seconds: float | None) -> None:
    assert openai._retry_after(header) == seconds
    assert openai._retry_after("Fri, 31 Dec 1999 23:59:59 GMT") == 0.0


def test_a_hung_request_holds_up_nothing_but_itself() -> None:
    with Loopback(fault=lambda number: "hang" if number < 3 else None) as server:
        outcomes = _run(_engine(server, concurrency=4, timeout_s=1.0, max_retries=0), _requests(100))
    assert Counter(type(outcome) for outcome in outcomes) == {Answer: 97, Failure: 3}


def test_a_dead_server_is_left_out_and_comes_back() -> None:
    is_down = True
    with Loopback(delay_s=0.01) as steady, Loopback(delay_s=0.01, fault=lambda _: "reset" if is_down else None) as shaky:
        engine = _engine(steady, shaky)

        async def run() -> None:
            nonlocal is_down
            num = 0
            async for outcome in engine.answer(_requests(400)):
                assert isinstance(outcome, Answer)
                num += 1
                if num == 150:
                    assert shaky.num_requests < 20
                    is_down = False
            assert num == 400

        asyncio.run(run())
        assert shaky.num_requests > 50


def test_a_server_that_never_answers_stops_the_run_with_the_reason() -> None:
    with Loopback(fault=lambda _: "500") as server:
        began = time.monotonic()
        with pytest.raises(EngineError, match=r"no server has answered for \d s; .* was http_500: injected 500\. Mend it and run again"):
            _run(_engine(server, concurrency=200), _requests(25_000))
        assert server.num_requests < 250 and time.monotonic() - began < 5


def test_prompts_that_are_all_refused_stop_the_run_before_many_are_spent() -> None:
    with Loopback(fault=lambda number: "400" if number > 50 else None) as server, pytest.raises(EngineError, match=r"\d+ prompts failed in a row; .* http_400"):
        _run(_engine(server), _requests(25_000))
    assert server.num_requests < 100


def test_quick_failures_in_front_of_slow_answers_leave_no_server_out(caplog: pytest.LogCaptureFixture) -> None:
    with Loopback(delay_s=1.5, fault=lambda number: "500" if number % 10 == 0 else None) as server, caplog.at_level(logging.WARNING):
        outcomes = _run(_engine(server, concurrency=100), _requests(100))
    assert len(outcomes) == 100 and all(isinstance(outcome, Answer) for outcome in outcomes)
    assert not [record for record in caplog.records if "left out" in record.message]


def test_refused_prompts_among_slow_ones_stop_nothing() -> None:
    with Loopback(delay_s=1.0, fault=lambda number: "400" if number % 4 == 0 else None) as server:
        outcomes = _run(_engine(server, concurrency=100), _requests(150))  # the first answers come behind more than 20 refusals
    assert Counter(type(outcome) for outcome in outcomes) == {Answer: 112, Failure: 38}


def test_a_restart_of_the_server_is_waited_for_but_not_for_ever() -> None:
    with Loopback(fault=lambda number: "reset" if 20 <= number < 40 else None) as server:
        outcomes = _run(_engine(server, max_retries=6), _requests(60))
    assert all(isinstance(outcome, Answer) for outcome in outcomes) and len(outcomes) == 60
    with Loopback(fault=lambda number: "reset" if number >= 20 else None) as server, pytest.raises(EngineError, match="no server has answered"):
        _run(_engine(server, patience_s=0.5), _requests(60))


def test_a_reader_that_leaves_early_leaves_no_request_behind() -> None:
    with Loopback(delay_s=0.2) as server:

        async def run() -> None:
            stream = _engine(server).answer(_requests(100))
            async for _ in stream:
                break
            await stream.aclose()  # type: ignore[attr-defined]
            assert len(asyncio.all_tasks()) == 1

        asyncio.run(run())


def test_an_error_in_the_prompts_reaches_the_reader() -> None:
    def broken() -> Iterator[Request]:
        yield from _requests(3)
        raise ValueError("the prompts' file is gone")

    with Loopback() as server, pytest.raises(ValueError, match="the prompts' file is gone"):
        _run(_engine(server), broken())


def test_one_engine_serves_many_runs_of_the_event_loop() -> None:
    with Loopback() as server:
        engine = _engine(server)
        assert [len(_run(engine, _requests(5))) for _ in range(3)] == [5, 5, 5]


def test_what_shapes_the_answer_is_sent_and_depends_on_the_prompt_alone() -> None:
    sampling = Sampling(0.7, 0.9, max_completion_tokens=1000, max_seq_len=600, stop_ids=(END,), seed=1)
    with Loopback() as server:
        _run(_engine(server, sampling=sampling), _requests(3))
        _run(_engine(server, sampling=sampling, concurrency=1), reversed(list(_requests(3))))
        by_prompt: dict[str, set[int]] = {}
        for body in server.bodies:
            by_prompt.setdefault(body["messages"][0]["content"], set()).add(body["seed"])
            length = len(encode_turn(TOKENIZER, body["messages"]))
            assert body["max_tokens"] == 600 - length
            assert (body["temperature"], body["top_p"], body["top_k"], body["stop_token_ids"], body["return_token_ids"]) == (0.7, 0.9, -1, [END], True)
    assert all(len(seeds) == 1 for seeds in by_prompt.values()) and len(set.union(*by_prompt.values())) == 3


def test_a_prompt_without_room_for_an_answer_is_not_sent() -> None:
    with Loopback() as server:
        failure = _only(_engine(server, sampling=Sampling(max_seq_len=5)))
        assert failure.kind == "too_long" and server.num_requests == 0


def test_a_request_without_messages_continues_its_ids() -> None:
    with Loopback() as server:
        (answer,) = _run(_engine(server), [Request("magpie-0", 0, [163587, 5, 163601])])
        assert server.bodies[0]["prompt"] == [163587, 5, 163601]
    assert isinstance(answer, Answer) and answer.prompt_ids == [163587, 5, 163601] and answer.provenance["exact"]


# Thoughts


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
@pytest.mark.parametrize("exact", [True, False])
def test_kimis_thought_lies_between_its_think_tokens_once(field: str, exact: bool) -> None:
    with Loopback(kimi, reasoning_field=field, exact=exact) as server:
        answer = _only(_engine(server, think_tokens=[THINK, CLOSE]))
    ids = to_row(answer).input_ids
    assert (ids.count(THINK), ids.count(CLOSE), ids[-1]) == (1, 1, END)
    assert ids.index(THINK) == len(answer.prompt_ids) - 1  # the template opens the thought, so the target is not trained to
    assert answer.provenance["exact"] is exact and "reasoning" not in answer.provenance
    if not exact:
        assert TOKENIZER.decode(answer.completion_ids) == "a thought</think>the answer<|im_end|>"


@pytest.mark.parametrize("exact", [True, False])
def test_a_thought_cut_at_the_limit_is_kept(exact: bool) -> None:
    thought = [ord(letter) for letter in "let me th"]
    header = encode_turn(TOKENIZER, [{"role": "user", "content": "question 0"}])
    reply = Reply(None, "let me th", "length", prompt_ids=header, token_ids=thought)
    with Loopback(lambda _: reply, exact=exact) as server:
        answer = _only(_engine(server))
    assert (answer.finish_reason, answer.completion_ids, answer.prompt_ids) == ("length", thought, header)


def test_a_thinking_target_without_reasoning_is_said_once_loudly_and_on_each_row(caplog: pytest.LogCaptureFixture) -> None:
    with Loopback(lambda _: Reply("only the answer"), exact=False) as server, caplog.at_level(logging.WARNING):
        outcomes = _run(_engine(server), _requests(10))
    assert all(isinstance(outcome, Answer) and outcome.provenance["reasoning"] == "missing" for outcome in outcomes)
    assert len([record for record in caplog.records if "RETURNS NO REASONING" in record.message]) == 1


def test_where_an_answer_came_from_is_recorded() -> None:
    with Loopback(version="0.32.0") as server:
        provenance = _only(_engine(server)).provenance
        assert provenance["server"] == "vllm 0.32.0" and provenance["model"] == "target" and provenance["endpoint"] == "chat"
        assert provenance["sampling"]["max_seq_len"] == 16384 and provenance["finish_reason"] == "stop"
    with Loopback(version=None) as server:
        assert _only(_engine(server)).provenance["server"] == "vllm"


# What can't work is said before the first prompt is spent


def _refusal(engine: OpenAIEngine) -> str:
    began = time.monotonic()
    with pytest.raises(EngineError) as error:
        asyncio.run(engine.preflight())
    assert time.monotonic() - began < 12
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_wrong_address_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no working server at http://127.0.0.1:1/v1 (connection" in _refusal(_engine("http://127.0.0.1:1/v1"))
    with pytest.raises(EngineError, match="'localhost:8000', which is no address"):
        _engine("localhost:8000")
    with Loopback() as server:
        assert "has no page /models: correct engine.base_urls" in _refusal(_engine(server.url + "/chat"))
        asyncio.run(_engine(server.url.removesuffix("/v1")).preflight())  # a host alone is enough


def test_a_wrong_model_name_is_one_sentence() -> None:
    with Loopback(model="moonshotai/Kimi-K2.5") as server:
        assert "does not serve 'target' but 'moonshotai/Kimi-K2.5': set engine.model" in _refusal(_engine(server))


def test_a_wrong_key_is_one_sentence_without_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    with Loopback(key="right") as server:
        monkeypatch.delenv("OPENAI_API_KEY", raising=False)
        assert "refuses the request" in (text := _refusal(_engine(server))) and "OPENAI_API_KEY (sent: no key, as it is not set)" in text
        monkeypatch.setenv("MY_KEY", "sk-very-secret")
        text = _refusal(_engine(server, api_key_env="MY_KEY"))
        assert "environment variable MY_KEY" in text and "secret" not in text
        assert server.num_requests == 0
        monkeypatch.setenv("MY_KEY", "right")
        assert isinstance(_only(_engine(server, api_key_env="MY_KEY")), Answer)


def test_a_shorter_context_than_asked_is_one_sentence_before_any_prompt() -> None:
    with Loopback(max_model_len=4096) as server:
        assert "with a context of 4096 tokens, less than generation.max_seq_len=16384" in _refusal(_engine(server))
        with pytest.raises(EngineError, match="context of 4096"):
            _run(_engine(server), _requests(5))
        assert server.num_requests == 0
