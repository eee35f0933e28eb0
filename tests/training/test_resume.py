"""A killed or stopped run goes on as if nothing had happened: the same drafter, bit for bit."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from eagle3.errors import TrainingError
from eagle3.tracking import read_metrics

Train = Callable[..., dict[str, Any]]
Start = Callable[..., subprocess.Popen[str]]
# Long enough to be killed in, and with a checkpoint after each step.
LONG: dict[str, Any] = {"num_epochs": 20, "checkpoint_minutes": 0.0, "optimizer": "muon"}
RESULTS = ("train/loss", "train/lr", "train/grad_norm", "train/match_0", "val/acceptance_length")


def wait_for_step(folder: Path, step: int, process: subprocess.Popen[str]) -> None:
    path = folder / "metrics.jsonl"
    while not path.exists() or f'"step": {step},' not in path.read_text():
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.002)


def finish(process: subprocess.Popen[str]) -> None:
    said = process.communicate()[1]
    assert process.returncode == 0, said


def results(folder: Path) -> list[dict[str, float]]:
    return [{key: record[key] for key in RESULTS if key in record} for record in read_metrics(folder)]


def assert_same_drafter(folder: Path, other: Path) -> None:
    one, two = (load_file(each / "drafter" / "model.safetensors") for each in (folder, other))
    assert one.keys() == two.keys() and all(torch.equal(weight, two[name]) for name, weight in one.items())


@pytest.mark.slow
def test_a_run_ended_at_three_random_steps_equals_the_uninterrupted_one(start_training: Start, tmp_path: Path) -> None:
    finish(start_training(tmp_path / "whole", **LONG))
    last = read_metrics(tmp_path / "whole")[-1]["step"]
    seed = random.randrange(1000)
    steps = sorted(random.Random(seed).sample(range(2, last - 30), 3))
    for step, how in zip(steps, (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL)):
        process = start_training(tmp_path / "ended", **LONG)
        wait_for_step(tmp_path / "ended", step, process)
        process.send_signal(how)
        said = process.communicate()[1]
        assert how == signal.SIGKILL or (process.returncode == 1 and "the same command goes on from there" in said), said
    finish(start_training(tmp_path / "ended", **LONG))
    assert results(tmp_path / "ended") == results(tmp_path / "whole"), f"seed {seed}"
    assert_same_drafter(tmp_path / "ended", tmp_path / "whole")


def test_time_used_up_and_patience_survive_a_restart(train_in: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from eagle3.training.loop import Trainer

    finish = Trainer._finish
    monkeypatch.setattr(Trainer, "_finish", lambda self: pytest.fail("not reached"))
    limits: dict[str, Any] = {"max_minutes": 0.3 / 60, "num_epochs": 10_000, "validate_every": 10_000}
    with pytest.raises(pytest.fail.Exception):
        train_in(tmp_path / "a", **limits)
    monkeypatch.setattr(Trainer, "_finish", finish)
    before = torch.load(tmp_path / "a" / "checkpoint.pt")["progress"]
    facts = train_in(tmp_path / "a", **limits)
    assert before["seconds"] >= 0.3 and facts["train_seconds"] == before["seconds"] and facts["steps"] == before["step"]


def test_only_our_files_come_and_go(train_in: Train, tmp_path: Path) -> None:
    from eagle3.training import remove_checkpoints

    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "notes.pt").write_text("mine")
    train_in(tmp_path / "a", num_epochs=1, checkpoint_minutes=0.0)
    assert {path.name for path in (tmp_path / "a").iterdir()} == {"notes.pt", "metrics.jsonl", "best.pt", "checkpoint.pt", "drafter"}
    (tmp_path / "a" / ".checkpoint.pt").touch()
    remove_checkpoints(tmp_path / "a")
    assert {path.name for path in (tmp_path / "a").iterdir()} == {"notes.pt", "metrics.jsonl", "drafter"}


def test_a_damaged_checkpoint_is_one_sentence(train_in: Train, tmp_path: Path) -> None:
    train_in(tmp_path / "a", num_epochs=1)
    (tmp_path / "a" / "checkpoint.pt").write_bytes(b"PK torn")
    with pytest.raises(TrainingError, match=r"checkpoint\.pt is damaged .* delete it") as caught:
        train_in(tmp_path / "a", num_epochs=1)
    assert "\n" not in str(caught.value)
    assert json.loads((tmp_path / "a" / "metrics.jsonl").read_text().splitlines()[0])["step"] == 1
