"""The replay of a trained drafter on real rows of a real target, against a server's loop written plainly: draft, verify, advance, one token at a time."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from eagle3.capture import capture_rows
from eagle3.config import CaptureConfig
from eagle3.conversation import Answer, Request, Row, encode_turn, to_row
from eagle3.drafter.model import new_drafter
from eagle3.drafter.ttt import ttt_loss
from eagle3.drafter.vocabulary import build_vocabulary_map, count_tokens
from eagle3.engines import Sampling
from eagle3.engines.transformers import TransformersEngine
from eagle3.evaluation.drafter import replay_drafter
from eagle3.hidden_states import StateReader
from eagle3.training.batches import compact, load_batch

NUM_ROWS, MAX_K = 20, 4
AUX_LAYERS = [2, 15, 27]


async def _answers(engine: TransformersEngine, requests: list[Request]) -> list[Row]:
    return [to_row(outcome) async for outcome in engine.answer(requests) if isinstance(outcome, Answer)]


def _drafter(target: Path, rows: list[Row], reader: StateReader) -> Any:
    """A drafter that knows some of these rows: trained on them for a few steps, in fp32."""
    drafter: Any = new_drafter(str(target), AUX_LAYERS, build_vocabulary_map(count_tokens(rows), 1024, 49_152), seed=1)
    optimizer = torch.optim.AdamW([parameter for parameter in drafter.parameters() if parameter.requires_grad], lr=1e-3)
    batch = load_batch([compact(row) for row in rows], reader, torch.device("cpu"), torch.float32)
    for _ in range(25):
        ttt_loss(drafter, batch, num_steps=3).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return drafter


@torch.no_grad()
def _drafts(drafter: Any, ids: list[int], aux: torch.Tensor, known: int, k: int) -> list[int]:
    """What a server drafts behind the first `known` tokens: the states of all but the last of them go in, then its own drafts, over a key-value cache."""
    cache, drafts = DynamicCache(), list[int]()
    tokens, hidden = torch.tensor([ids[1:known]]), drafter.fc(aux[None, : known - 1])
    positions = torch.arange(1, known)[None]
    for _ in range(k):
        states = torch.cat([drafter.embed_tokens(tokens), hidden], dim=-1)
        seen = cache.get_seq_length()
        causal = torch.ones(tokens.shape[1], seen + tokens.shape[1], dtype=torch.bool).tril(seen)[None, None]
        rotary = drafter.rotary_emb(states, positions)
        for layer in drafter.layers:
            states = layer(states, attention_mask=causal, position_ids=positions, past_key_values=cache, position_embeddings=rotary)
        hidden = states[:, -1:]
        draft = int(drafter.lm_head(drafter.norm(hidden)).argmax())
        drafts.append(draft + int(drafter.d2t[draft]))
        tokens, positions = torch.tensor([drafts[-1:]]), positions[:, -1:] + 1
    return drafts


def _served(drafter: Any, row: Row, aux: torch.Tensor, k: int) -> tuple[int, int]:
    """Decoding steps and accepted tokens of one row: the prefill gives the first answer token, the rest comes by steps."""
    known = row.loss_mask.index(1) + 1
    num_steps = num_accepted = 0
    while known < len(row.input_ids):
        accepted = 0
        for draft in _drafts(drafter, row.input_ids, aux, known, k):
            if known + accepted >= len(row.input_ids) or draft != row.input_ids[known + accepted]:
                break
            accepted += 1
        num_steps, num_accepted, known = num_steps + 1, num_accepted + accepted, known + accepted + 1
    return num_steps, num_accepted


@pytest.mark.slow
def test_the_replay_of_twenty_real_rows_is_the_loop_of_a_server_exactly(tmp_path: Path, smollm2: Path, smollm2_model: Any, smollm2_tokenizer: Any) -> None:
    questions = [f"Tom has {number} apples and eats {number // 2} of them. How many are left?" for number in range(3, 3 + NUM_ROWS)]
    requests = [Request(f"q{i}", 0, encode_turn(smollm2_tokenizer, [{"role": "user", "content": text}])) for i, text in enumerate(questions)]
    rows = asyncio.run(_answers(TransformersEngine(smollm2_model, Sampling(max_completion_tokens=32, stop_ids=(2,))), requests))
    capture_rows(rows, lambda: smollm2_model, tmp_path, CaptureConfig(), AUX_LAYERS, 0.0, "capture")
    reader = StateReader(tmp_path)
    drafter = _drafter(smollm2, rows, reader)
    reports = replay_drafter(drafter, rows, reader, "float32", range(1, MAX_K + 1), "ours", 0.0)
    assert len(rows) == NUM_ROWS and 1.2 < reports[-1].acceptance_length < 4
    for report in reports:
        for row, counts in zip(rows, report.rows, strict=True):
            aux = reader.read(row.id, row.input_ids)[:, :-1].flatten(1).float()
            assert (counts.num_steps, counts.num_accepted) == _served(drafter, row, aux, report.k), (row.id, report.k)
