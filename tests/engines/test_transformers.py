from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
import torch

import eagle3.engines.transformers as module
from eagle3.conversation import Answer, Failure, Request
from eagle3.engines import Sampling
from eagle3.engines.transformers import TransformersEngine, sample
from eagle3.errors import EngineError


def answers(engine: TransformersEngine, requests: list[Request]) -> dict[str, Answer]:
    async def collect() -> list[Answer | Failure]:
        return [answer async for answer in engine.answer(requests)]

    found = asyncio.run(collect())
    assert len(found) == len(requests)
    return {answer.prompt_id: answer for answer in found if isinstance(answer, Answer)}


def requests_of(lengths: list[int]) -> list[Request]:
    ids = random.Random(1)
    return [Request(f"p{i}", 0, [ids.randrange(300) for _ in range(length)]) for i, length in enumerate(lengths)]


def reference(model: Any, request: Request, max_new_tokens: int, stop_ids: tuple[int, ...]) -> list[int]:
    ids = torch.tensor([request.prompt_ids])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_new_tokens, eos_token_id=list(stop_ids) or None, pad_token_id=0
    )
    completion: list[int] = out[0, len(request.prompt_ids) :].tolist()
    return completion


LENGTHS = [1, 40, 3, 17, 18, 2, 33, 9, 64, 5, 1, 28, 70]


@pytest.mark.parametrize(("batch_size", "cache_tokens", "prefill_tokens"), [(1, 4096, 64), (4, 4096, 4096), (32, 4096, 64), (8, 160, 48)])
def test_greedy_answers_are_those_of_generate(
    tiny_model: Any, monkeypatch: pytest.MonkeyPatch, batch_size: int, cache_tokens: int, prefill_tokens: int
) -> None:
    monkeypatch.setattr(module, "SMALLEST_CAPACITY", 16)  # so that the cache grows, shrinks and sends rows back to the queue (last case)
    requests = requests_of(LENGTHS)
    stop_ids = (7, 11, 42, 99, 150, 151, 152, 200, 250, 260)
    expected = {request.prompt_id: reference(tiny_model, request, 40, stop_ids) for request in requests}
    engine = TransformersEngine(
        tiny_model,
        Sampling(max_completion_tokens=40, stop_ids=stop_ids),
        batch_size=batch_size,
        cache_tokens=cache_tokens,
        prefill_tokens=prefill_tokens,
    )
    found = answers(engine, requests)
    assert {id: answer.completion_ids for id, answer in found.items()} == expected
    reasons = {id: "stop" if ids[-1] in stop_ids else "length" for id, ids in expected.items()}
    assert {id: answer.finish_reason for id, answer in found.items()} == reasons
    assert set(reasons.values()) == {"stop", "length"}


def test_an_answer_ends_at_the_longest_sequence_and_a_prompt_without_room_fails(tiny_model: Any) -> None:
    engine = TransformersEngine(tiny_model, Sampling(max_completion_tokens=8, max_seq_len=20))
    requests = requests_of([19, 20, 15, 4, 0])
    found = answers(engine, requests)
    assert {id: len(answer.completion_ids) for id, answer in found.items()} == {"p0": 1, "p2": 5, "p3": 8}

    async def failures() -> list[str]:
        return [f"{a.prompt_id} {a.kind}" async for a in engine.answer(requests) if isinstance(a, Failure)]

    assert asyncio.run(failures()) == ["p1 too_long", "p4 empty"]


def test_a_target_s_own_context_is_a_limit_too(tiny_model: Any) -> None:
    found = answers(TransformersEngine(tiny_model, Sampling(max_seq_len=100_000)), requests_of([250]))
    assert len(found["p0"].completion_ids) == 6


def test_a_sampled_answer_depends_on_its_request_and_the_seed_alone(tiny_model: Any) -> None:
    requests = requests_of(LENGTHS)

    def sampled(requests: list[Request], seed: int = 3, **kwargs: int) -> dict[str, list[int]]:
        engine = TransformersEngine(tiny_model, Sampling(1.0, 0.9, 30, stop_ids=(7,), seed=seed), **kwargs)
        return {id: answer.completion_ids for id, answer in answers(engine, requests).items()}

    together = sampled(requests)
    assert sampled(requests[::-1], batch_size=3) == together
    for request in requests[:4]:
        assert sampled([request]) == {request.prompt_id: together[request.prompt_id]}
    assert sampled(requests, seed=4) != together
    same_words = [[Request(name, turn, [5, 6])] for name, turn in (("a", 0), ("b", 0), ("a", 1))]
    assert len({tuple(ids) for one in same_words for ids in sampled(one).values()}) == 3


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 0.8), (1.5, 0.35)])
def test_tokens_are_drawn_from_the_nucleus_in_proportion(temperature: float, top_p: float) -> None:
    logits = torch.tensor([2.0, 1.5, 0.1, 1.0, -1.0, -30.0])
    probs = (logits / temperature).softmax(-1)
    order = probs.argsort(descending=True)
    kept = order[: int((probs[order].cumsum(-1) < top_p).sum()) + 1]
    expected = torch.zeros(6).index_copy(0, kept, probs[kept] / probs[kept].sum())
    number = 20_000
    tokens = sample(logits.expand(number, -1), temperature, top_p, [random.Random(f"{i}") for i in range(number)])
    measured = torch.bincount(torch.tensor(tokens), minlength=6) / number
    assert not measured[expected == 0].any()
    torch.testing.assert_close(measured, expected, atol=0.015, rtol=0)  # four standard errors


def test_the_first_of_equal_logits_is_taken_as_argmax_does() -> None:
    logits = torch.randn(64, 50_000, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert ((logits == logits.amax(-1, keepdim=True)).sum(-1) > 1).any()
    assert torch.equal(logits.max(-1).indices, logits.argmax(-1))


def test_a_target_that_answers_with_nan_stops_the_engine(tiny_model: Any) -> None:
    tiny_model.lm_head.weight[0, 0] = torch.nan
    with pytest.raises(EngineError, match="not finite"):
        answers(TransformersEngine(tiny_model, Sampling(max_completion_tokens=4)), requests_of([5]))


def test_a_target_with_sliding_windows_is_refused() -> None:
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(
        vocab_size=50, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, sliding_window=16
    )
    with pytest.raises(EngineError, match="engine=vllm"):
        TransformersEngine(MistralForCausalLM(config), Sampling())


def test_a_real_target_answers_and_ends_its_turn(smollm2_model: Any, smollm2_tokenizer: Any) -> None:
    questions = ["What is the capital of France? Answer in one word.", "Name three colours."]
    requests = [
        Request(q, 0, smollm2_tokenizer.apply_chat_template([{"role": "user", "content": q}], add_generation_prompt=True, return_dict=False)) for q in questions
    ]
    found = answers(TransformersEngine(smollm2_model, Sampling(max_completion_tokens=100, stop_ids=(2,))), requests)
    first = found[questions[0]]
    assert "Paris" in smollm2_tokenizer.decode(first.completion_ids)
    assert (first.finish_reason, first.completion_ids[-1], first.completion_ids.count(2)) == ("stop", 2, 1)
