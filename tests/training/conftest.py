"""A tiny target on disk with rows and states, and training on them: in this process, or in one that the test may kill."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from eagle3.conversation import Row
from eagle3.hidden_states import StateWriter
from eagle3.targets import read_target
from eagle3.tracking import StageTracker
from eagle3.training.settings import TrainingConfig
from eagle3.training.train import train

HIDDEN, VOCAB, LAYERS = 32, 300, (2, 4, 5, 8)
SMALL: dict[str, Any] = {
    "draft_vocab_size": 64,
    "intermediate_size": 48,
    "batch_tokens": 60,
    "num_epochs": 3,
    "dtype": "float32",
    "device": "cpu",
    "validation_fraction": 0.15,
    "max_grad_norm": 100.0,
}
PROGRAM = """
import json, sys
from pathlib import Path
from eagle3.errors import Eagle3Error
from eagle3.targets import read_target
from eagle3.tracking import StageTracker
from eagle3.training.settings import TrainingConfig
from eagle3.training.train import train

world, folder = Path(sys.argv[1]), Path(sys.argv[2])
folder.mkdir(exist_ok=True)
places = read_target(world / "target"), world / "rows.jsonl", world / "states", folder
with (folder / "metrics.jsonl").open("a") as file:
    try:
        train(TrainingConfig(**json.loads(sys.argv[3])), *places, StageTracker([file], "train", None))
    except Eagle3Error as error:
        sys.exit(f"error: {error}")
"""


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `target`, `rows.jsonl` and `states`: 24 rows whose answers repeat a few tokens, so that a drafter can learn them."""
    folder = tmp_path_factory.mktemp("world")
    config = LlamaConfig(
        hidden_size=HIDDEN,
        vocab_size=VOCAB,
        num_hidden_layers=LAYERS[-1],
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.3,
        eos_token_id=5,
    )
    torch.manual_seed(0)
    target = LlamaForCausalLM(config)
    target.save_pretrained(folder / "target")
    writer = StateWriter(folder / "states", LAYERS, 1 << 20)
    with (folder / "rows.jsonl").open("w") as file:
        for number in range(24):
            prompt, answer = 3 + number % 5, 10 + 3 * (number % 7)
            ids = torch.randint(100, 130, (prompt + answer,)).tolist()
            row = Row(id=f"r{number}", prompt_id=f"p{number}", turn=0, input_ids=ids, loss_mask=[0] * prompt + [1] * answer)
            file.write(json.dumps(dataclasses.asdict(row)) + "\n")
            with torch.no_grad():
                states = target(torch.tensor([ids]), output_hidden_states=True).hidden_states
            writer.append(row.id, ids, torch.stack([states[layer][0] for layer in (*LAYERS[:-1], LAYERS[-1] - 1)], dim=1))
    writer.flush()
    return folder


@pytest.fixture
def train_in(world: Path) -> Callable[..., dict[str, Any]]:
    """Train in a folder, in this process; returns the facts, and the metrics under `metrics`."""

    def run(folder: Path, *, states: Path = world / "states", rows: Path = world / "rows.jsonl", **settings: Any) -> dict[str, Any]:
        folder.mkdir(exist_ok=True)
        path = folder / "metrics.jsonl"
        with path.open("a") as file:
            facts = train(TrainingConfig(**SMALL | settings), read_target(world / "target"), rows, states, folder, StageTracker([file], "train", None))
        return facts | {"metrics": [json.loads(line) for line in path.read_text().splitlines()]}

    return run


@pytest.fixture
def start_training(world: Path) -> Callable[..., subprocess.Popen[str]]:
    """Start the same training in a process of its own."""

    def start(folder: Path, **settings: Any) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", PROGRAM, str(world), str(folder), json.dumps(SMALL | settings)]
        return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)

    return start
