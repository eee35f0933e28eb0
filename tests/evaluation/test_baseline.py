"""A drafter as baseline: in either form, and what is refused with its reason before a server starts or an hour is spent."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from eagle3.config import BaselineConfig
from eagle3.drafter.eagle_form import export_eagle
from eagle3.drafter.model import new_drafter
from eagle3.drafter.vocabulary import build_vocabulary_map
from eagle3.errors import DrafterError
from eagle3.evaluation import baseline as room
from eagle3.evaluation.baseline import Baseline
from eagle3.targets import TargetInfo

LAYERS = [2, 3, 4]


def baseline(folder: Path | str, target: TargetInfo, layers: list[int] = LAYERS) -> Baseline:
    return Baseline(BaselineConfig("theirs", path=str(folder)), target, layers)


def test_a_drafter_of_the_target_passes_and_its_digest_is_of_its_content(small_drafter: Path, small_target: TargetInfo) -> None:
    one = baseline(small_drafter, small_target)
    one.check()
    assert one.load().d2t.shape == (120,)
    before = one.digest
    moved = small_drafter.rename(small_drafter.with_name("moved"))
    assert baseline(moved, small_target).digest == before


def test_a_head_in_the_form_of_eagle_passes(small_target: TargetInfo, tmp_path: Path) -> None:
    vocabulary = build_vocabulary_map(dict.fromkeys(range(100), 1), 120, 500)
    export_eagle(new_drafter(str(small_target.path), LAYERS, vocabulary, norm_before_residual=False), tmp_path / "eagle")
    baseline(tmp_path / "eagle", small_target).check()


def _without(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda weights: weights.pop(name)


def _nan(weights: dict[str, Any]) -> None:
    weights["fc.weight"][0, 0] = float("nan")


def _narrow(weights: dict[str, Any]) -> None:
    weights["fc.weight"] = weights["fc.weight"][:, :64].contiguous()


@pytest.mark.parametrize(
    ("damage", "message"), [(_without("d2t"), "missing .'d2t'"), (_nan, "not finite in fc.weight"), (_narrow, r"has fc\.weight of shape \(64, 64\)")]
)
def test_damaged_weights_are_refused_with_the_reason(
    small_drafter: Path, small_target: TargetInfo, damage: Callable[[dict[str, Any]], None], message: str
) -> None:
    weights = load_file(small_drafter / "model.safetensors")
    damage(weights)
    save_file(weights, small_drafter / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(DrafterError, match=message):
        baseline(small_drafter, small_target).check()


def test_a_head_of_another_target_is_refused_by_its_config_alone(small_drafter: Path, small_target: TargetInfo) -> None:
    config = json.loads((small_drafter / "config.json").read_text())
    config["transformer_layer_config"] |= {"hidden_size": 7168, "vocab_size": 163_840}
    (small_drafter / "config.json").write_text(json.dumps(config))
    with pytest.raises(DrafterError, match=r"baseline\.path=.* hidden size 7168 and 163840 tokens, but .* has 64 and 500: choose a drafter of this target"):
        baseline(small_drafter, small_target).check()


def test_a_head_that_reads_other_layers_says_which(small_drafter: Path, small_target: TargetInfo) -> None:
    with pytest.raises(DrafterError, match=r"reads the target's layers \[2, 3, 4\], but \[1, 3, 5\] are captured: set capture\.aux_layers=\[2, 3, 4\]"):
        baseline(small_drafter, small_target, [1, 3, 5]).check()


def test_what_is_no_drafter_is_named_by_its_own_key(tmp_path: Path, small_target: TargetInfo) -> None:
    with pytest.raises(DrafterError, match=r"^baseline\.path=.* holds no config\.json"):
        baseline(tmp_path, small_target).check()


def test_a_head_of_the_hub_is_checked_by_its_config_and_fetched_meanwhile(
    small_drafter: Path, small_target: TargetInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[str] = []

    def fetch(name: str) -> Path:
        fetched.append(name)
        return small_drafter

    monkeypatch.setattr(room, "_hub_config", lambda _: small_drafter)
    monkeypatch.setattr(room, "fetch_drafter", fetch)
    one = baseline("org/head", small_target)
    one.check()
    assert one.folder == small_drafter and fetched[0] == "org/head"
    with pytest.raises(DrafterError, match="choose a drafter of this target"):
        baseline("org/head", replace(small_target, hidden_size=128)).check()
