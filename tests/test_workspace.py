"""What names the target, and which layers of it a drafter may read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eagle3.cli import check
from eagle3.config import register
from eagle3.errors import ConfigError
from eagle3.pipeline import Pipeline
from eagle3.workspace import Workspace

register()


def _workspace(folder: Path, *overrides: str) -> Workspace:
    model = folder / "model"
    if not model.exists():
        model.mkdir()
        shape = {"hidden_size": 8, "num_hidden_layers": 8, "vocab_size": 50, "max_position_embeddings": 64}
        (model / "config.json").write_text(json.dumps(shape))
        (model / "model.safetensors").write_bytes(bytes(100))
    return Workspace(check(["target=path", f"target.path={model}", f"paths.store={folder / 'store'}", *overrides]), folder, {})


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "tokenizer.model", "modeling.py", "chat_template.jinja"])
def test_another_content_of_the_same_size_is_another_target(tmp_path: Path, name: str) -> None:
    before = _workspace(tmp_path).target_signature
    assert _workspace(tmp_path).target_signature == before
    (tmp_path / "model" / name).write_bytes(b"x" * 100)
    assert _workspace(tmp_path).target_signature != before


@pytest.mark.parametrize(
    ("layers", "message"), [("[5,2,3]", "must ascend"), ("[2,2,5]", "must be distinct"), ("[2,5,8]", r"lie in 1\.\.7"), ("[0,2,5]", r"lie in 1\.\.7")]
)
def test_layers_that_a_server_would_hand_over_otherwise_are_refused(tmp_path: Path, layers: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _ = _workspace(tmp_path, f"capture.aux_layers={layers}").aux_layers
    assert _workspace(tmp_path, "capture.aux_layers=[2,3,5]").aux_layers == [2, 3, 5]


def test_other_think_tokens_find_no_old_answers_and_speed_finds_them_all(tmp_path: Path) -> None:
    def pool(*overrides: str) -> str:
        config = _workspace(tmp_path, *overrides).config
        return Pipeline(config, tmp_path, {})._pool_signature("train")

    assert pool() != pool('target.think_tokens=["3","4"]') != pool('target.think_tokens=["3","5"]')
    for same in ("generation.concurrency=3", "generation.num_samples=7", "generation.seed=1", "generation.min_completion_tokens=9", "engine.device=cpu"):
        assert pool(same) == pool()
    assert pool("generation.temperature=1") != pool("generation.temperature=1", "generation.seed=1")


@pytest.mark.parametrize("token", [-1, 50])
def test_a_pinned_token_outside_the_vocabulary_is_refused_before_any_work(tmp_path: Path, token: int) -> None:
    (tmp_path / "q.jsonl").write_text('{"prompt": "one"}\n')
    config = _workspace(tmp_path, "dataset=jsonl", f"dataset.path={tmp_path / 'q.jsonl'}", f"training.pinned_tokens=[{token}]").config
    with pytest.raises(ConfigError, match=rf"training\.pinned_tokens=\[{token}\] are not in the target's vocabulary of 50"):
        Pipeline(config, tmp_path, {}).run()
    assert not list((tmp_path / "store").iterdir())
