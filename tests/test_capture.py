from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3.capture import TransformersCapture, head_agreement
from eagle3.conversation import Answer, Request
from eagle3.engines import Sampling
from eagle3.engines.transformers import TransformersEngine
from eagle3.errors import CaptureError
from eagle3.hidden_states import StateReader, StateWriter

LENGTHS = [5, 31, 1, 12, 12, 30, 7]


def rows() -> list[list[int]]:
    ids = random.Random(2)
    return [[ids.randrange(299) for _ in range(length)] for length in LENGTHS]


@pytest.mark.parametrize("batch_tokens", [1, 40, 10_000])
def test_states_are_what_enters_each_layer_and_the_norm_whatever_the_batch(tiny_model: Any, batch_tokens: int) -> None:
    captured = dict(TransformersCapture(tiny_model, [1, 2, 4], batch_tokens).states(rows()))
    assert sorted(captured) == list(range(len(LENGTHS)))
    for index, ids in enumerate(rows()):
        hidden = tiny_model.model(torch.tensor([ids]), output_hidden_states=True).hidden_states
        states = captured[index]
        assert states.shape == (len(ids), 4, 32) and states.dtype == torch.bfloat16
        for k, layer in enumerate((1, 2)):
            torch.testing.assert_close(states[:, k], hidden[layer][0].bfloat16(), rtol=0.01, atol=1e-5)
        assert torch.equal(states[:, 2], states[:, 3])  # id n is the final state
        torch.testing.assert_close(tiny_model.model.norm(states[:, 3].float()), hidden[-1][0], rtol=0.02, atol=0.02)


def test_a_model_that_the_engine_uses_gives_the_same_states(tiny_model: Any) -> None:
    before = dict(TransformersCapture(tiny_model, [1, 2, 3]).states(rows()))
    TransformersEngine(tiny_model, Sampling())
    after = dict(TransformersCapture(tiny_model, [1, 2, 3]).states(rows()))
    for index, states in before.items():
        torch.testing.assert_close(after[index], states, rtol=0.01, atol=1e-3)


def test_a_row_with_damaged_states_is_named_or_left_out(tiny_model: Any) -> None:
    tiny_model.model.embed_tokens.weight[299, 0] = torch.nan
    damaged = rows()
    damaged[3][4] = 299
    names = [f"row-{i}" for i in range(len(damaged))]
    capture = TransformersCapture(tiny_model, [1, 2, 3])
    with pytest.raises(CaptureError, match="row row-3"):
        list(capture.states(damaged, names))
    left_out: list[int] = []
    good = dict(capture.states(damaged, on_damaged=lambda index, error: left_out.append(index)))
    assert left_out == [3] and sorted(good) == [0, 1, 2, 4, 5, 6]


def test_layers_that_the_target_does_not_have_are_refused(tiny_model: Any) -> None:
    with pytest.raises(CaptureError, match=r"\[5\].*capture.aux_layers"):
        TransformersCapture(tiny_model, [1, 2, 5])


def test_the_head_predicts_the_target_s_own_tokens_from_the_final_state_only(smollm2_model: Any, smollm2_tokenizer: Any) -> None:
    prompts = ["Explain why the sky is blue.", "Write a short story about a fox."]
    requests = [
        Request(p, 0, smollm2_tokenizer.apply_chat_template([{"role": "user", "content": p}], add_generation_prompt=True, return_dict=False)) for p in prompts
    ]

    async def collect() -> list[Any]:
        return [answer async for answer in TransformersEngine(smollm2_model, Sampling(max_completion_tokens=60, stop_ids=(2,))).answer(requests)]

    found = [answer for answer in asyncio.run(collect()) if isinstance(answer, Answer)]
    ids = [answer.prompt_ids + answer.completion_ids for answer in found]
    masks = [[0] * len(answer.prompt_ids) + [1] * len(answer.completion_ids) for answer in found]
    head = (smollm2_model.model.norm, smollm2_model.lm_head)
    captured = dict(TransformersCapture(smollm2_model, [2, 15, 29]).states(ids))
    right = [head_agreement(captured[i], ids[i], masks[i], *head) for i in captured]
    one_layer_early = [head_agreement(captured[i][:, [2]], ids[i], masks[i], *head) for i in captured]
    # Not 1: bfloat16 logits tie, and a decode step rounds otherwise than a whole row. One layer early still finds half of the tokens.
    assert min(right) > 0.9 and max(one_layer_early) < 0.7, (right, one_layer_early)


def test_agreement_is_asked_of_supervised_tokens_only(tiny_model: Any) -> None:
    ids = rows()[1]
    states = next(states for _, states in TransformersCapture(tiny_model, [1]).states([ids]))
    with pytest.raises(CaptureError, match="no token"):
        head_agreement(states, ids, [0] * len(ids), tiny_model.model.norm, tiny_model.lm_head)
    predicted = int(tiny_model(torch.tensor([ids])).logits[0, 9].argmax())
    ids = [*ids[:10], predicted, *ids[11:]]
    mask = [0] * 10 + [1] + [0] * (len(ids) - 11)
    assert head_agreement(states, ids, mask, tiny_model.model.norm, tiny_model.lm_head) == 1.0


def test_states_that_find_no_room_are_one_sentence_and_leave_no_torn_shard(tmp_path: Path) -> None:
    import resource

    writer = StateWriter(tmp_path, [1, 2], shard_bytes=1 << 30)
    writer.append("row", [1, 2, 3], torch.zeros(3, 2, 4096, dtype=torch.bfloat16))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))  # a file may not grow past a page: as on a full disk
    try:
        with pytest.raises(CaptureError, match=r"hidden states can't be written .*free space"):
            writer.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.iterdir())
    writer.flush()
    assert StateReader(tmp_path).read("row", [1, 2, 3]).shape == (3, 2, 4096)
