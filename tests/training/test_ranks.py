"""Several processes train what one would: two gloo processes on the CPU, started by torchrun as on GPUs."""

from __future__ import annotations

import json
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
TWENTY: dict[str, Any] = {"num_epochs": 10, "max_steps": 20, "validate_every": 2}


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"normalizer": "rows", "micro_batch_tokens": 40, "batch_tokens": 20, "max_grad_norm": 0.1}], ids=str)
def test_two_processes_equal_one(train_in: Train, tmp_path: Path, settings: dict[str, Any]) -> None:
    facts = [train_in(tmp_path / str(num), num_gpus=num, **TWENTY, **settings) for num in (1, 2)]
    one, two = (load_file(tmp_path / str(num) / "drafter" / "model.safetensors") for num in (1, 2))
    assert max(float((weight.double() - two[name].double()).abs().max()) for name, weight in one.items()) <= 1e-5
    steps = [[record for record in each["metrics"] if "train/loss" in record] for each in facts]
    assert len(steps[0]) == len(steps[1]) == 20
    for key in ("train/loss", "train/grad_norm", "train/match_1", "train/lr", "train/supervised_share"):
        assert [record[key] for record in steps[0]] == pytest.approx([record[key] for record in steps[1]], rel=1e-4), key
    same = ("steps", "tokens", "train_rows", "validation_acceptance_length", "best_epoch", "left_out_rows")
    assert all(facts[0][key] == facts[1][key] for key in same)
    assert not [path for path in (tmp_path / "2").iterdir() if path.name.startswith("workers")]


@pytest.mark.slow
def test_an_error_of_any_process_is_one_sentence(train_in: Train, world: Path, tmp_path: Path) -> None:
    lines = [json.loads(line) for line in (world / "rows.jsonl").read_text().splitlines()]
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row | ({"id": "lost"} if row["id"] == "r9" else {})) + "\n" for row in lines))
    with pytest.raises(TrainingError, match=r"^row lost has no hidden states"):
        train_in(tmp_path / "a", rows=rows, num_gpus=2, **TWENTY)


def processes_with(text: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        found += [line] if text in line and "launch" in line else []
    return found


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for processes in /proc")
def test_workers_end_with_the_run_and_it_goes_on_from_there(start_training: Start, train_in: Train, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"num_gpus": 2, "num_epochs": 100, "validate_every": 100}
    for how in (signal.SIGTERM, signal.SIGKILL):
        process = start_training(tmp_path / "a", **settings)
        seen = (tmp_path / "a" / "metrics.jsonl").stat().st_size if how == signal.SIGKILL else 0
        while not (path := tmp_path / "a" / "metrics.jsonl").exists() or path.stat().st_size <= seen:
            assert process.poll() is None, process.communicate()[1]
            time.sleep(0.01)
        process.send_signal(how)
        said = process.communicate()[1]
        assert how == signal.SIGKILL or "the same command goes on from there" in said
        deadline = time.monotonic() + 30
        while processes_with(str(tmp_path)):
            assert time.monotonic() < deadline, processes_with(str(tmp_path))
            time.sleep(0.1)
        assert (tmp_path / "a" / "checkpoint.pt").exists()
    step = torch.load(tmp_path / "a" / "checkpoint.pt")["progress"]["step"]
    assert step > 1
    train_in(tmp_path / "a", **settings | {"num_gpus": 1, "max_steps": step + 3})
    assert read_metrics(tmp_path / "a")[-1]["step"] == step + 3
