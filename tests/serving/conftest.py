"""Real vLLM servers on the CPU, started once per session: one with SmolLM2 as it is, one that thinks."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from eagle3.serving.vllm import ServerSettings, VLLMServer

VENV = Path(__file__).parents[2] / ".venv-vllm"


def _settings(model: Path, *extra_args: str) -> ServerSettings:
    if not VENV.exists():
        pytest.skip(f"there is no {VENV.name}: run `make vllm`")
    return ServerSettings(model, "smollm2", 2048, VENV, device="cpu", extra_args=("--enforce-eager", *extra_args), ready_timeout_s=300)


@pytest.fixture(scope="session")
def vllm_settings() -> Callable[..., ServerSettings]:
    """What a server of a model is started with, for tests that start their own."""
    return _settings


@pytest.fixture(scope="session")
def vllm_server(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMServer]:
    with VLLMServer(_settings(smollm2), tmp_path_factory.mktemp("vllm") / "server.log") as server:
        yield server


@pytest.fixture(scope="session")
def thinking_target(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2 with two unused special tokens renamed to <think> and </think>, and a template that opens the thought."""
    folder = tmp_path_factory.mktemp("thinking") / "model"
    shutil.copytree(smollm2, folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (folder / name).read_text(encoding="utf-8")
        (folder / name).write_text(text.replace("<issue_start>", "<think>").replace("<issue_closed>", "</think>"), encoding="utf-8")
    template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    header = json.dumps("<|im_start|>assistant\n")[1:-1].replace("\\n", "\n")
    assert header in template
    opened = template.rpartition(header)
    (folder / "chat_template.jinja").write_text(opened[0] + header + "<think>\nOkay, " + opened[2], encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def thinking_server(thinking_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMServer]:
    settings = _settings(thinking_target, "--reasoning-parser", "deepseek_r1")
    with VLLMServer(settings, tmp_path_factory.mktemp("vllm") / "thinking.log") as server:
        yield server
