"""A run that is killed again and again leaves the same rows as one that never was."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from eagle3.prompts import new_prompt, write_prompts
from tests.loopback import Loopback

ROOT = Path(__file__).parents[1]
RUN = """
import asyncio, sys
from pathlib import Path
from eagle3.engines import Sampling
from eagle3.engines.openai import OpenAIEngine
from eagle3.generation import answer_prompts, collect_rows
from eagle3.prompts import load_prompts
from eagle3.store import KeyedLog
from tests.loopback import KimiTokenizer

folder, url, tokenizer = Path(sys.argv[1]), sys.argv[2], KimiTokenizer()
prompts = list(load_prompts(folder / "prompts.jsonl"))
with KeyedLog(folder / "answers.jsonl") as pool:
    engine = OpenAIEngine([url], "target", Sampling(), tokenizer, concurrency=8, timeout_s=0.5, max_retries=9)
    failures = asyncio.run(answer_prompts(prompts, engine, tokenizer, pool, lambda _: None))
    assert not failures, failures
    collect_rows(prompts, pool, folder / "rows.jsonl", 1, "keep")
"""


def _start(folder: Path, url: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", RUN, str(folder), url], env=os.environ | {"PYTHONPATH": str(ROOT)}, start_new_session=True)


def _num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.slow
def test_twenty_kills_lose_no_row_and_repeat_none(tmp_path: Path) -> None:
    prompts = [new_prompt([{"role": "user", "content": f"question {i}, turn {turn}"} for turn in range(1 + i % 2)]) for i in range(400)]
    calm, killed = tmp_path / "calm", tmp_path / "killed"
    for folder in (calm, killed):
        folder.mkdir()
        write_prompts(folder / "prompts.jsonl", prompts)
    draws = random.Random(0)
    with Loopback(delay_s=0.01, fault_rate=0.05) as server:
        assert _start(calm, server.url).wait(120) == 0
        for _ in range(20):
            process, before = _start(killed, server.url), _num_lines(killed / "answers.jsonl")
            wanted = before + draws.randrange(1, 25)
            while process.poll() is None and _num_lines(killed / "answers.jsonl") < wanted:
                time.sleep(0.002)
            time.sleep(draws.uniform(0, 0.02))
            assert process.poll() is None, "the run ended before it was killed 20 times"
            process.send_signal(signal.SIGKILL)
            process.wait()
        assert _start(killed, server.url).wait(120) == 0
    assert (killed / "rows.jsonl").read_bytes() == (calm / "rows.jsonl").read_bytes()
    keys = [json.loads(line)["key"] for line in (killed / "answers.jsonl").read_text().splitlines()]
    assert len(keys) == len(set(keys)) == 600
