"""Checkpoints of EAGLE and SpecForge: read, written, and what is refused instead of being misread."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3.drafter.eagle_form import export_eagle
from eagle3.drafter.model import new_drafter, save_drafter
from eagle3.drafter.pretrained import aux_layers, drafter_digest, fetch_drafter, load_initial
from eagle3.drafter.ttt import draft_matches, ttt_loss
from eagle3.drafter.vocabulary import VocabularyMap
from eagle3.errors import DrafterError
from eagle3.targets import TargetInfo, read_target

Maker = Callable[..., Any]
LAYERS = [2, 3, 1]
ROWS = ((5, 9), (8, 3))


@pytest.fixture
def target(target_path: str) -> TargetInfo:
    return read_target(target_path)


@pytest.fixture
def plain(target_path: str, vocabulary: VocabularyMap) -> Any:
    """A drafter as SGLang serves it, with trained-looking norms and a head that is not the target's."""
    drafter: Any = new_drafter(target_path, LAYERS, vocabulary, norm_before_residual=False, intermediate_size=80)
    drafter.config.transformer_layer_config.rope_parameters = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6}
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if parameter.requires_grad or name == "lm_head.weight":
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    return drafter


@pytest.fixture
def exported(plain: Any, tmp_path: Path) -> Path:
    export_eagle(plain, tmp_path / "eagle")
    return tmp_path / "eagle"


def change(folder: Path, **settings: Any) -> None:
    config = json.loads((folder / "config.json").read_text()) | settings
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def test_the_exported_form_converts_back_bit_equal(plain: Any, exported: Path, target: TargetInfo, make_batch: Maker, tmp_path: Path) -> None:
    names = set(load_file(exported / "model.safetensors"))
    assert {"midlayer.self_attn.q_proj.weight", "midlayer.hidden_norm.weight", "fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"} <= names
    assert not [name for name in names if name.startswith(("layers", "embed", "verifier"))]
    back = load_initial(str(exported), target, LAYERS, {})
    assert plain.state_dict().keys() == back.state_dict().keys()
    assert all(torch.equal(weight, back.state_dict()[name]) for name, weight in plain.state_dict().items())
    assert back.config.transformer_layer_config.rope_parameters == {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6}
    # The rotary tables are made when a drafter is built, so the first one is built again from its checkpoint.
    save_drafter(plain, tmp_path / "speculators")
    again, batch = load_initial(str(tmp_path / "speculators"), target, LAYERS, {}), make_batch(ROWS)
    assert ttt_loss(again, batch, num_steps=2).loss == ttt_loss(back, batch, num_steps=2).loss
    assert all(map(torch.equal, draft_matches(again, batch, num_steps=3), draft_matches(back, batch, num_steps=3)))
    export_eagle(back, tmp_path / "twice")
    assert (tmp_path / "twice" / "model.safetensors").read_bytes() == (exported / "model.safetensors").read_bytes()
    assert (tmp_path / "twice" / "config.json").read_text() == (exported / "config.json").read_text()


def test_its_own_embeddings_are_kept_if_it_has_some(exported: Path, target: TargetInfo) -> None:
    weights = load_file(exported / "model.safetensors")
    weights["embed_tokens.weight"] = torch.rand(500, 64)
    save_file(weights, exported / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(load_initial(str(exported), target, LAYERS, {}).embed_tokens.weight, weights["embed_tokens.weight"])


@pytest.mark.parametrize(
    ("listed", "read"),
    [
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 30, 58]}}, [2, 30, 58]),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 29, 57]}}, [2, 30, 58]),
        ({"eagle_config": None, "eagle_aux_hidden_state_layer_ids": [3, 20, 40]}, [3, 20, 40]),
        ({"eagle_config": None}, [2, 30, 58]),
    ],
)
def test_auxiliary_layers_are_read_in_either_convention(exported: Path, listed: dict[str, Any], read: list[int]) -> None:
    change(exported, **listed)
    assert aux_layers(exported, 61) == read


def test_norms_that_vllm_reads_from_its_config_are_kept(exported: Path, target: TargetInfo) -> None:
    change(exported, norm_before_residual=True, norm_output=True)
    config = load_initial(str(exported), target, LAYERS, {"norm_output": True}).config
    assert config.norm_before_residual and config.norm_output and not config.fc_norm


def test_what_does_not_fit_is_one_sentence(exported: Path, target: TargetInfo, tmp_path: Path) -> None:
    with pytest.raises(DrafterError, match=r"reads the target's layers \[2, 3, 1\].*captured are \[1, 2, 3\]: set capture\.aux_layers=\[2, 3, 1\]"):
        load_initial(str(exported), target, [1, 2, 3], {})
    with pytest.raises(DrafterError, match=r"training\.draft_vocab_size=99 can't be had .* has 150: leave training\.draft_vocab_size null"):
        load_initial(str(exported), target, LAYERS, {"num_layers": 1, "draft_vocab_size": 99})
    with pytest.raises(DrafterError, match=r"a target of 500 tokens and hidden size 64, but .* has 500 and 128"):
        load_initial(str(exported), TargetInfo(target.path, 128, 4, 500, 512, ()), LAYERS, {})
    with pytest.raises(DrafterError, match=r"no config\.json with weights"):
        load_initial(str(tmp_path), target, LAYERS, {})
    change(exported, architectures=["Eagle3DeepseekV2ForCausalLM"])
    with pytest.raises(DrafterError, match="not an EAGLE-3 drafter"):
        load_initial(str(exported), target, LAYERS, {})


def test_a_damaged_checkpoint_is_refused(exported: Path, target: TargetInfo) -> None:
    weights = load_file(exported / "model.safetensors")
    for name in ("d2t", "midlayer.mlp.up_proj.weight"):
        save_file({key: weight for key, weight in weights.items() if key != name}, exported / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(DrafterError, match=rf"missing .*{name.replace('midlayer', 'layers.0')}"):
            load_initial(str(exported), target, LAYERS, {})


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"norm_before_residual": True}, r"training\.norm_before_residual=true"),
        ({"fc_norm": True, "num_layers": 2}, r"training\.fc_norm=true and 2 llama layers"),
        ({"architecture": "qwen3"}, "1 qwen3 layers"),
    ],
)
def test_what_the_form_can_not_say_is_not_exported(target_path: str, vocabulary: VocabularyMap, tmp_path: Path, settings: dict[str, Any], reason: str) -> None:
    drafter: Any = new_drafter(target_path, LAYERS, vocabulary, **{"norm_before_residual": False} | settings)
    with pytest.raises(DrafterError, match=reason):
        export_eagle(drafter, tmp_path / "eagle")
    assert not (tmp_path / "eagle").exists()


def test_trained_embeddings_and_ambiguous_layers_are_not_exported(plain: Any, target_path: str, vocabulary: VocabularyMap, tmp_path: Path) -> None:
    with pytest.raises(DrafterError, match=r"auxiliary layers \[1, 2, 3\]"):
        export_eagle(new_drafter(target_path, [1, 2, 3], vocabulary, norm_before_residual=False), tmp_path / "eagle")
    with torch.no_grad():
        plain.embed_tokens.weight[0, 0] += 1
    with pytest.raises(DrafterError, match="trained embeddings"):
        export_eagle(plain, tmp_path / "eagle")


def test_the_digest_is_of_the_content(exported: Path, tmp_path: Path) -> None:
    before = drafter_digest(fetch_drafter(str(exported)))
    exported.rename(tmp_path / "elsewhere")
    assert drafter_digest(tmp_path / "elsewhere") == before
    change(tmp_path / "elsewhere", rope_theta=5.0)
    assert drafter_digest(tmp_path / "elsewhere") != before
