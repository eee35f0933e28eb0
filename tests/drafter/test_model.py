"""Making, saving and loading a drafter; what a damaged checkpoint is refused for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from eagle3.drafter.model import load_drafter, new_drafter, save_drafter
from eagle3.drafter.ttt import draft_matches, ttt_loss
from eagle3.drafter.vocabulary import VocabularyMap, build_vocabulary_map
from eagle3.errors import DrafterError

Maker = Callable[..., Any]
ROWS = ((5, 9), (8, 3))


def test_embeddings_and_head_are_the_targets_and_frozen(target_path: str, vocabulary: VocabularyMap) -> None:
    drafter: Any = new_drafter(target_path, [1, 2, 3], vocabulary, num_layers=2, intermediate_size=32)
    target = AutoModelForCausalLM.from_pretrained(target_path, dtype=torch.float32)
    head = target.lm_head.weight[vocabulary.draft_ids]
    assert torch.equal(drafter.embed_tokens.weight, target.model.embed_tokens.weight)
    assert torch.equal(drafter.lm_head.weight, head) and torch.equal(drafter.verifier_lm_head.weight, head)
    assert torch.equal(drafter.verifier_norm.weight, target.model.norm.weight)
    frozen = {name for name, parameter in drafter.named_parameters() if not parameter.requires_grad}
    assert frozen == {"embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight", "verifier_norm.weight"}
    assert {parameter.dtype for parameter in drafter.parameters()} == {torch.float32}
    assert not drafter.uses_sliding_window_attn
    assert [layer.mlp.gate_proj.out_features for layer in drafter.layers] == [32, 32]


def test_seed_decides_the_weights_and_leaves_the_global_state(target_path: str, vocabulary: VocabularyMap) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, again, other = (new_drafter(target_path, [1, 2, 3], vocabulary, seed=seed).state_dict() for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["fc.weight"], other["fc.weight"])


def test_a_target_that_does_not_fit_is_refused(target_path: str, vocabulary: VocabularyMap, tmp_path: Path) -> None:
    with pytest.raises(DrafterError, match="distinct"):
        new_drafter(target_path, [1, 1, 2], vocabulary)
    with pytest.raises(DrafterError, match="t2d"):
        new_drafter(target_path, [1, 2, 3], build_vocabulary_map({}, 10, 600))
    with pytest.raises(DrafterError, match="No drafter can be made for the target"):
        new_drafter(str(tmp_path), [1, 2, 3], vocabulary)


@pytest.mark.parametrize("settings", [{}, {"architecture": "qwen3", "num_layers": 2, "fc_norm": True, "norm_output": True}], ids=str)
def test_a_saved_drafter_is_the_same_drafter(make_drafter: Maker, make_batch: Maker, target_path: str, tmp_path: Path, settings: dict[str, Any]) -> None:
    drafter, batch = make_drafter(**settings), make_batch(ROWS)
    save_drafter(drafter, tmp_path / "drafter")
    loaded = load_drafter(tmp_path / "drafter")
    assert drafter.state_dict().keys() == loaded.state_dict().keys()
    assert all(torch.equal(weight, loaded.state_dict()[name]) for name, weight in drafter.state_dict().items())
    assert [p.requires_grad for p in drafter.parameters()] == [p.requires_grad for p in loaded.parameters()]
    assert ttt_loss(drafter, batch, num_steps=2).loss == ttt_loss(loaded, batch, num_steps=2).loss
    assert all(map(torch.equal, draft_matches(drafter, batch, num_steps=2), draft_matches(loaded, batch, num_steps=2)))
    config = json.loads((tmp_path / "drafter" / "config.json").read_text())
    assert config["speculators_config"]["verifier"] == {"name_or_path": target_path, "architectures": ["LlamaForCausalLM"]}
    assert {"d2t", "t2d", "embed_tokens.weight", "lm_head.weight"} <= load_file(tmp_path / "drafter" / "model.safetensors").keys()


def test_a_checkpoint_names_its_target_so_that_it_is_found_from_anywhere(
    checkpoint: Path, target_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(target_path).parent)
    save_drafter(load_drafter(checkpoint, Path(target_path).name), checkpoint)
    monkeypatch.chdir(tmp_path)
    assert load_drafter(checkpoint).config.speculators_config.verifier.name_or_path == target_path


def test_a_full_vocabulary_needs_no_map(target_path: str, make_batch: Maker, tmp_path: Path) -> None:
    save_drafter(new_drafter(target_path, [1, 2, 3], build_vocabulary_map({}, 500, 500)), tmp_path / "drafter")
    loaded = load_drafter(tmp_path / "drafter")
    assert loaded.d2t is None
    assert ttt_loss(loaded, make_batch(ROWS), num_steps=2).loss.isfinite()
    assert len(draft_matches(loaded, make_batch(ROWS), num_steps=2)) == len(ROWS)


def test_saving_replaces_a_drafter_and_nothing_else(make_drafter: Maker, checkpoint: Path) -> None:
    save_drafter(make_drafter(norm_output=True), checkpoint)
    assert load_drafter(checkpoint).config.norm_output
    (checkpoint / "notes.txt").write_text("mine")
    with pytest.raises(DrafterError, match=r"notes\.txt"):
        save_drafter(make_drafter(), checkpoint)
    assert [path.name for path in checkpoint.parent.iterdir()] == [checkpoint.name]


def without_map(weights: dict[str, Tensor]) -> None:
    del weights["d2t"], weights["t2d"]


def random_map(weights: dict[str, Tensor]) -> None:
    weights["d2t"][3] += 1


def nan_embeddings(weights: dict[str, Tensor]) -> None:
    weights["embed_tokens.weight"][3, 4] = torch.nan


def short_head(weights: dict[str, Tensor]) -> None:
    weights["lm_head.weight"] = weights["lm_head.weight"][1:].clone()


def unknown_weight(weights: dict[str, Tensor]) -> None:
    weights["midlayer.weight"] = torch.zeros(2)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (without_map, "missing .*'d2t', 't2d'"),
        (random_map, "disagree"),
        (nan_embeddings, "not finite in embed_tokens.weight"),
        (short_head, r"lm_head.weight of shape \(149, 64\).*\(150, 64\)"),
        (unknown_weight, "unknown .*'midlayer.weight'"),
    ],
)
def test_a_damaged_checkpoint_is_refused(checkpoint: Path, damage: Callable[[dict[str, Tensor]], None], reason: str) -> None:
    weights = load_file(checkpoint / "model.safetensors")
    damage(weights)
    save_file(weights, checkpoint / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(DrafterError, match=reason):
        load_drafter(checkpoint)


def test_what_is_no_checkpoint_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(DrafterError, match="can't be read"):
        load_drafter(checkpoint, target_path=str(tmp_path / "nowhere"))
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(DrafterError, match=r"no \.safetensors file"):
        load_drafter(checkpoint)
    (checkpoint / "config.json").write_text("{}")
    with pytest.raises(DrafterError, match="not an EAGLE-3 drafter"):
        load_drafter(checkpoint)
