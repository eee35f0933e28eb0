"""Going on from a drafter: it starts where the source was, keeps what is its own, and is refused where it does not fit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from eagle3.drafter.eagle_form import export_eagle
from eagle3.drafter.model import load_drafter
from eagle3.errors import DrafterError

Train = Callable[..., dict[str, Any]]
FREE: dict[str, Any] = {"draft_vocab_size": None, "intermediate_size": None}


@pytest.fixture
def source(train_in: Train, tmp_path: Path) -> dict[str, Any]:
    """A drafter trained a while, in both forms: `drafter` and `eagle`."""
    facts = train_in(tmp_path / "source", num_epochs=2, lr=3e-3, norm_before_residual=False)
    export_eagle(load_drafter(tmp_path / "source" / "drafter"), tmp_path / "eagle")
    return facts


@pytest.mark.parametrize("form", ["source/drafter", "eagle"])
def test_it_starts_at_the_sources_acceptance_length_and_keeps_its_vocabulary(source: dict[str, Any], train_in: Train, tmp_path: Path, form: str) -> None:
    facts = train_in(tmp_path / "tuned", init=str(tmp_path / form), num_epochs=2, lr=1e-3, **FREE)
    first = facts["metrics"][0]
    assert (first["step"], first["epoch"]) == (0, 0)
    assert first["val/acceptance_length"] == pytest.approx(source["validation_acceptance_length"], abs=1e-6)
    assert facts["validation_acceptance_length"] >= source["validation_acceptance_length"]
    before, after = (load_file(tmp_path / name / "drafter" / "model.safetensors") for name in ("source", "tuned"))
    assert all(torch.equal(before[name], after[name]) for name in ("d2t", "t2d", "lm_head.weight", "embed_tokens.weight"))
    assert facts["steps"] > 0 and after["fc.weight"].shape == before["fc.weight"].shape


def test_the_source_stays_the_best_if_training_only_harms_it(source: dict[str, Any], train_in: Train, tmp_path: Path) -> None:
    facts = train_in(tmp_path / "tuned", init=str(tmp_path / "eagle"), num_epochs=1, lr=3.0, **FREE)
    assert facts["best_epoch"] == 0 and facts["validation_acceptance_length"] == source["validation_acceptance_length"]
    before, after = (load_file(tmp_path / name / "drafter" / "model.safetensors") for name in ("source", "tuned"))
    assert torch.equal(before["fc.weight"], after["fc.weight"])


def test_another_vocabulary_than_the_checkpoints_is_refused(source: dict[str, Any], train_in: Train, tmp_path: Path) -> None:
    train_in(tmp_path / "same", init=str(tmp_path / "eagle"), num_epochs=1, draft_vocab_size=64, intermediate_size=48)
    with pytest.raises(DrafterError, match=r"training\.draft_vocab_size=65 can't be had .* has 64"):
        train_in(tmp_path / "other", init=str(tmp_path / "eagle"), draft_vocab_size=65)
