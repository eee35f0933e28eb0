"""A real server that speculates with a drafter of ours: it must say what the plain server says, and accept what a replay says it accepts."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eagle3.capture import capture_rows
from eagle3.config import CaptureConfig, TrainingConfig
from eagle3.conversation import Row, encode_turn
from eagle3.drafter.model import load_drafter
from eagle3.engines import Sampling
from eagle3.evaluation.drafter import replay_drafter
from eagle3.evaluation.live import LiveReport, identical_share, measure
from eagle3.hidden_states import StateReader
from eagle3.serving.speculation import Speculation
from eagle3.serving.vllm import ServerSettings, VLLMServer
from eagle3.targets import load_tokenizer, read_target
from eagle3.tracking import StageTracker
from eagle3.training.train import train

ASKED = [
    f"{name} has {n} {thing} and buys {n + 3} more. How many {thing} has {name} now? Explain."
    for n, (name, thing) in enumerate((("Tom", "apples"), ("Ann", "books"), ("Max", "coins"), ("Eva", "pens"), ("Ben", "cards"), ("Mia", "shells")), 2)
]
LAYERS, NUM_TOKENS, K = [2, 15, 27], 64, 3
SAMPLING = Sampling(0.0, 1.0, NUM_TOKENS, 1024, (2,))


def _measured(settings: ServerSettings, rows: list[Row], arm: str, k: int, log_path: Path) -> list[LiveReport]:
    with VLLMServer(settings, log_path) as server:
        return measure(arm, k, server.base_url, settings.name, rows, SAMPLING, [1, 3], 120)


def _trained(smollm2: Path, rows: list[Row], states: Path, folder: Path) -> Path:
    """A drafter that has learned these very rows by heart, so that many of its drafts are accepted."""
    (folder / "rows.jsonl").write_text("".join(json.dumps(dataclasses.asdict(row)) + "\n" for row in rows))
    config = TrainingConfig(draft_vocab_size=2048, batch_tokens=128, num_epochs=25, validate_every=25, device="cpu", dtype="float32")
    train(config, read_target(smollm2), folder / "rows.jsonl", states, folder, StageTracker([], "train", None))
    return folder / "drafter"


@pytest.mark.vllm
@pytest.mark.slow
def test_a_speculating_server_says_the_same_and_accepts_what_the_replay_says(
    smollm2: Path, smollm2_model: Any, vllm_settings: Callable[..., ServerSettings], tmp_path: Path
) -> None:
    tokenizer = load_tokenizer(smollm2)
    prompts = [encode_turn(tokenizer, [{"role": "user", "content": text}]) for text in ASKED]
    asked = [Row(f"p{i}-0", f"p{i}", 0, ids, [0] * len(ids)) for i, ids in enumerate(prompts)]
    plain = _measured(vllm_settings(smollm2), asked, "none", 0, tmp_path / "plain.log")
    assert plain[0].tokens_per_step == 1 and plain[0].counters.acceptance_length is None

    said = [list(answer.completion_ids) for answer in plain[0].answers]
    rows = [dataclasses.replace(row, input_ids=row.input_ids + ids, loss_mask=row.loss_mask + [1] * len(ids)) for row, ids in zip(asked, said, strict=True)]
    capture_rows(rows, lambda: smollm2_model, tmp_path / "states", CaptureConfig(), LAYERS, 0.0, "capture")
    drafter = _trained(smollm2, rows, tmp_path / "states", tmp_path)
    [replayed] = replay_drafter(load_drafter(drafter), rows, StateReader(tmp_path / "states"), "float32", [K], "ours", 0.0)
    assert replayed.acceptance_length > 1.5

    live = _measured(vllm_settings(smollm2, *Speculation(K, drafter).args), rows, "ours", K, tmp_path / "ours.log")
    shares = [identical_share(mine, theirs) for mine, theirs in zip(live, plain, strict=True)]
    print(f"identical answers: {shares[0]:.0%} at 1 in flight, {shares[1]:.0%} at 3")
    assert shares[0] >= 5 / 6  # what differs, if anything, is a tie within bfloat16's rounding

    acceptance = live[0].acceptance(rows)
    assert acceptance is not None and acceptance.acceptance_length == live[0].counters.acceptance_length
    print(f"tokens per step: replayed {replayed.tokens_per_step:.3f}, live {acceptance.tokens_per_step:.3f}")
    print(f"acceptance length: replayed {replayed.acceptance_length:.3f}, live {acceptance.acceptance_length:.3f}")
    assert acceptance.tokens_per_step == pytest.approx(replayed.tokens_per_step, rel=0.03)
    # The server also counts what it accepts past the end of a row, up to k tokens of each (vllm#56101).
    past_the_end = sum(counts.num_accepted + counts.num_steps - counts.num_tokens for counts in acceptance.rows)
    assert 0 <= past_the_end <= K * len(rows)
    inside = acceptance.acceptance_length - past_the_end / acceptance.num_steps
    assert inside == pytest.approx(acceptance.tokens_per_step)
