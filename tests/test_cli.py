"""The command line where the machine or a sweep goes wrong: one sentence, before anything is made."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from eagle3.cli import _point_to_latest


def _refused(folder: Path, *arguments: str, code: int = 2) -> str:
    command = [str(Path(sys.executable).with_name("eagle3")), *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, env={**os.environ, "COLUMNS": "160"})
    assert done.returncode == code and len(done.stderr.splitlines()) == 1, done.stderr
    return done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["training.lr=1e-3,-4", "-m"], "training.lr=-4.0 can't work"),
        (["--multirun", "training.lr=1e-3,fast"], "'fast' of type 'str' could not be converted"),
        (["training.foo=1,2", "-m"], "Key 'foo' not in 'TrainingConfig'"),
    ],
)
def test_a_mistake_in_the_last_arm_of_a_sweep_is_said_before_the_first_starts(tmp_path: Path, arguments: list[str], message: str) -> None:
    assert message in _refused(tmp_path, *arguments)
    assert not list(tmp_path.iterdir())


def test_outputs_that_can_not_be_made_are_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "paths.outputs=file can't be made" in _refused(tmp_path, "paths.outputs=file", "paths.store=store")


def test_a_store_that_fills_up_is_one_sentence(tmp_path: Path) -> None:
    """/dev/full stands for the disk: every write to it fails as on a full one."""
    (tmp_path / "q.jsonl").write_text('{"prompt": "one"}\n{"prompt": "two"}\n{"prompt": "three"}\n')
    (tmp_path / "model").mkdir()
    shape = {"hidden_size": 8, "num_hidden_layers": 8, "vocab_size": 50, "max_position_embeddings": 16384}
    (tmp_path / "model" / "config.json").write_text(json.dumps(shape))
    arguments = [
        "target=path",
        "target.path=model",
        "training.draft_vocab_size=20",
        "dataset=jsonl",
        "dataset.path=q.jsonl",
        "evaluation.holdout_fraction=0.5",
        "tracking=disabled",
        "until=prompts",
    ]
    command = "import os, eagle3.prompts, eagle3.pipeline, eagle3.cli; "
    command += (
        "eagle3.pipeline.write_prompts = lambda path, prompts: eagle3.prompts.write_prompts(eagle3.prompts.Path('/dev/full'), prompts); eagle3.cli.main()"
    )
    done = subprocess.run([sys.executable, "-c", command, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "No space left on device; free space" in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert not list((tmp_path / "outputs" / "store" / "prompts").rglob("manifest.json"))


def test_a_run_is_none_the_worse_for_a_folder_where_its_link_should_be(tmp_path: Path) -> None:
    (tmp_path / "latest").mkdir()
    (tmp_path / "run").mkdir()
    _point_to_latest(tmp_path, tmp_path / "run")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "run"]
    (tmp_path / "latest").rmdir()
    _point_to_latest(tmp_path, tmp_path / "run")
    assert (tmp_path / "latest").resolve() == (tmp_path / "run").resolve()
