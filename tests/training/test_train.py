"""What training does with each choice, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from eagle3.drafter.model import load_drafter
from eagle3.errors import CaptureError, DrafterError, TrainingError

Train = Callable[..., dict[str, Any]]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "drafter" / "model.safetensors")


def test_a_drafter_learns_and_says_what_it_cost(train_in: Train, tmp_path: Path) -> None:
    facts = train_in(tmp_path / "a", lr=3e-3)
    steps = [record for record in facts["metrics"] if "train/loss" in record]
    assert steps[-1]["train/loss"] < 0.8 * steps[0]["train/loss"]
    assert facts["steps"] == len(steps) and facts["tokens"] > 0 and facts["validation_coverage"] == 1.0
    assert {"train/lr", "train/grad_norm", "train/match_0", "train/match_2", "train/tokens_per_s", "train/supervised_share"} <= steps[0].keys()
    validations = [record["val/acceptance_length"] for record in facts["metrics"] if "val/acceptance_length" in record]
    assert len(validations) == 3 and facts["validation_acceptance_length"] == max(validations)


@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer": "muon", "weight_decay": 0.1},
        {"normalizer": "positions"},
        {"normalizer": "rows", "loss": '{"ce": 0.1, "tv": 0.9}'},
        {"schedule": "linear", "min_lr_ratio": 0.1, "betas": [0.8, 0.99]},
        {"architecture": "qwen3", "num_layers": 2, "norm_before_residual": False, "fc_norm": True, "norm_output": True},
        {"ttt_steps": 2, "ttt_decay": 0.8, "dtype": "bfloat16"},
    ],
    ids=str,
)
def test_each_choice_trains_and_makes_another_drafter(train_in: Train, tmp_path: Path, settings: dict[str, Any]) -> None:
    plain, other = train_in(tmp_path / "a", num_epochs=1), train_in(tmp_path / "b", num_epochs=1, **settings)
    assert plain["steps"] == other["steps"] and all(torch.isfinite(weight).all() for weight in weights(tmp_path / "b").values())
    assert not torch.equal(weights(tmp_path / "a")["fc.weight"], weights(tmp_path / "b")["fc.weight"])


def test_head_and_embeddings_are_trained_only_when_asked_to(train_in: Train, world: Path, tmp_path: Path) -> None:
    train_in(tmp_path / "frozen", num_epochs=1)
    train_in(tmp_path / "trained", num_epochs=1, train_head=True, train_embeddings=True)
    frozen, trained = weights(tmp_path / "frozen"), weights(tmp_path / "trained")
    target = load_file(world / "target" / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(frozen["embed_tokens.weight"], target)
    assert not torch.equal(trained["embed_tokens.weight"], target) and not torch.equal(trained["lm_head.weight"], frozen["lm_head.weight"])
    assert torch.equal(load_drafter(tmp_path / "trained" / "drafter").embed_tokens.weight, trained["embed_tokens.weight"])


def test_pinned_and_end_tokens_are_in_the_draft_vocabulary(train_in: Train, tmp_path: Path) -> None:
    train_in(tmp_path / "a", num_epochs=1, draft_vocab_size=10, pinned_tokens=[7, 250])
    assert weights(tmp_path / "a")["t2d"][[5, 7, 250]].all() and int(weights(tmp_path / "a")["t2d"].sum()) == 10


@pytest.mark.parametrize("normalizer", ["supervised", "positions", "rows"])
def test_cutting_a_step_into_micro_batches_changes_nothing(train_in: Train, tmp_path: Path, normalizer: str) -> None:
    whole = train_in(tmp_path / "whole", num_epochs=1, normalizer=normalizer)
    cut = train_in(tmp_path / "cut", num_epochs=1, normalizer=normalizer, micro_batch_tokens=1)
    norms = [[record["train/grad_norm"] for record in facts["metrics"] if "train/grad_norm" in record] for facts in (whole, cut)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


def test_it_stops_at_the_first_limit_and_is_validated_there(train_in: Train, tmp_path: Path) -> None:
    facts = train_in(tmp_path / "steps", max_steps=7, validate_every=2)
    steps = [record for record in facts["metrics"] if "train/loss" in record]
    assert facts["steps"] == 7 and [record["step"] for record in facts["history"]] == [7]
    assert steps[-1]["train/lr"] < 0.2 * max(record["train/lr"] for record in steps)
    facts = train_in(tmp_path / "time", max_minutes=0.5 / 60, num_epochs=10_000, validate_every=10_000)
    rates = [record["train/lr"] for record in facts["metrics"] if "train/lr" in record]
    assert 0.45 < facts["train_seconds"] < 5 and len(facts["history"]) == 1
    assert rates[-1] < 0.1 * max(rates)
    facts = train_in(tmp_path / "patience", lr=1e-12, num_epochs=50, patience=2)
    assert len(facts["history"]) == 3 and facts["best_epoch"] == 1


def test_a_row_whose_states_are_not_finite_is_named(train_in: Train, world: Path, tmp_path: Path) -> None:
    (tmp_path / "states").mkdir()
    (shard,) = (world / "states").glob("*.safetensors")
    with safe_open(shard, framework="pt") as file:
        metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    row = json.loads(metadata["rows"])[9]
    tensors["states"][row["start"] + 2, 1, 3] = torch.inf
    save_file(tensors, tmp_path / "states" / shard.name, metadata=metadata)
    with pytest.raises(CaptureError, match=f"row {row['id']}: .* not finite"):
        train_in(tmp_path / "a", states=tmp_path / "states")


def test_a_loss_that_is_not_a_number_names_the_rows_of_the_step(train_in: Train, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"step \d+: the loss or its gradient is not a number; .* these rows: r\d+, r\d+"):
        train_in(tmp_path / "a", lr=1e30, warmup_ratio=0.0, weight_decay=1e10)


def test_rows_without_a_supervised_token_are_left_out_and_counted(train_in: Train, world: Path, tmp_path: Path) -> None:
    lines = [json.loads(line) for line in (world / "rows.jsonl").read_text().splitlines()]
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row | ({"loss_mask": [0] * len(row["input_ids"])} if row["id"] in ("r3", "r4") else {})) + "\n" for row in lines))
    assert train_in(tmp_path / "a", rows=rows, num_epochs=1)["left_out_rows"] == 2
    rows.write_text("".join(json.dumps(row | {"loss_mask": [0] * len(row["input_ids"])}) + "\n" for row in lines))
    with pytest.raises(TrainingError, match="0 rows to train on"):
        train_in(tmp_path / "b", rows=rows)


def test_a_draft_vocabulary_that_can_not_be_is_refused(train_in: Train, tmp_path: Path) -> None:
    with pytest.raises(DrafterError, match="draft_vocab_size is 301"):
        train_in(tmp_path / "a", draft_vocab_size=301)
