"""What the client costs: our engine and pool against the barest loop that can ask the same server the same thing.

    .venv/bin/python experiments/benchmarks/generation.py --model FOLDER         # a server without a model: rows/s, memory; speculators' tool beside it
    .venv/bin/python experiments/benchmarks/generation.py --faults               # time-outs, resets, 429, 500, broken JSON, empty answers, hung sockets
    .venv/bin/python experiments/benchmarks/generation.py --vllm --model FOLDER --prompts gsm8k.jsonl   # a real one on the CPU: tokens/s

All contestants run by turns in one process tree against one server, so that a machine's moods meet them alike; ratios are of medians.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

from eagle3.conversation import Answer, Failure, encode_turn
from eagle3.engines import Sampling
from eagle3.engines.openai import OpenAIEngine
from eagle3.generation import answer_prompts
from eagle3.prompts import Prompt, new_prompt, read_prompts
from eagle3.store import KeyedLog
from eagle3.targets import load_tokenizer

ROOT = Path(__file__).parents[2]


class WordTokenizer:
    """An id a character, so that the loopback's figures are of the client and not of a tokenizer."""

    eos_token_id = 2

    def apply_chat_template(self, messages: Any, *, tokenize: bool, add_generation_prompt: bool = False) -> str:
        return "".join(f"<{message['role']}>{message['content']}</>" for message in messages) + ("<assistant>" if add_generation_prompt else "")

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": list(map(ord, text))}

    def convert_tokens_to_ids(self, _: str) -> None:
        return None


async def _closed_loop(num: int, concurrency: int, ask: Callable[[int], Coroutine[Any, Any, int]]) -> int:
    """Sum of what `ask` returns for 0 .. num - 1, with `concurrency` of them under way."""
    numbers = iter(range(num))

    async def work() -> int:
        return sum([await ask(number) for number in numbers])

    return sum(await asyncio.gather(*(work() for _ in range(concurrency))))


async def bare_openai(url: str, model: str, prompts: list[Prompt], concurrency: int, max_tokens: int) -> int:
    """Tokens answered to a loop around AsyncOpenAI that keeps nothing."""
    import httpx2
    import openai

    http = openai.DefaultAsyncHttpxClient(limits=httpx2.Limits())
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, http_client=http) as client:

        async def ask(number: int) -> int:
            reply: Any = await client.chat.completions.create(
                model=model,
                messages=list(prompts[number].messages),  # type: ignore[arg-type]
                max_tokens=max_tokens,
                temperature=0,
                extra_body={"return_token_ids": True},
            )
            return len(reply.choices[0].token_ids)

        return await _closed_loop(len(prompts), concurrency, ask)


async def bare_aiohttp(url: str, model: str, prompts: list[Prompt], concurrency: int, max_tokens: int) -> int:
    """Tokens answered to the fastest loop there is: the server's ceiling."""
    import aiohttp

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(None)) as session:

        async def ask(number: int) -> int:
            body = {"model": model, "messages": prompts[number].messages, "max_tokens": max_tokens, "temperature": 0, "return_token_ids": True}
            async with session.post(f"{url}/chat/completions", json=body) as response:
                reply = await response.json()
            return len(reply["choices"][0]["token_ids"])

        return await _closed_loop(len(prompts), concurrency, ask)


async def ours(url: str, model: str, prompts: list[Prompt], concurrency: int, sampling: Sampling, tokenizer: Any) -> int:
    """Tokens answered by the engine into a pool on the disk, as the generate stage does it."""
    tokens = 0

    def count(outcome: Answer | Failure) -> None:
        nonlocal tokens
        assert isinstance(outcome, Answer), outcome
        tokens += len(outcome.completion_ids)

    with tempfile.TemporaryDirectory() as folder, KeyedLog(Path(folder) / "answers.jsonl") as pool:
        engine = OpenAIEngine([url], model, sampling, tokenizer, concurrency=concurrency)
        await answer_prompts(prompts, engine, tokenizer, pool, count)
        assert len(pool) == len(prompts)
    return tokens


def speculators_tool(url: str, prompts: list[Prompt], concurrency: int) -> float:
    """Rows/s of speculators' regenerate-responses between its first and its last row, so without its imports."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "prompts.jsonl", Path(folder) / "rows.jsonl"
        source.write_text("".join(json.dumps({"id": prompt.id, "messages": prompt.messages}) + "\n" for prompt in prompts))
        argv = [str(Path(sys.executable).with_name("speculators")), "regenerate-responses", "--endpoint", f"{url}/chat/completions"]
        argv += ["--dataset", str(source), "--concurrency", str(concurrency), "--outfile", str(target)]
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        first: float | None = None
        while process.poll() is None:
            time.sleep(0.02)
            if first is None and target.exists() and target.stat().st_size:
                first, early = time.monotonic(), target.read_bytes().count(b"\n")
        ended = time.monotonic()
        if process.returncode or first is None:
            assert process.stdout is not None
            raise SystemExit(f"speculators' tool failed: {process.stdout.read()[-2000:]}")
        return (target.read_bytes().count(b"\n") - early) / (ended - first)


@contextlib.contextmanager
def loopback(*options: str) -> Iterator[str]:
    """The test suite's server in a process of its own."""
    process = subprocess.Popen([sys.executable, str(ROOT / "tests" / "loopback.py"), *options], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.wait()


def by_turns(rounds: int, contestants: dict[str, Callable[[], float]]) -> dict[str, float]:
    """Median rate of each contestant; all of them run once per round, and the first round (not counted) warms the server up."""
    rates: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(rounds + 1):
        for name, contest in contestants.items():
            rate = contest()
            if turn:
                rates[name].append(rate)
    for name, values in rates.items():
        print(f"{name:32} {statistics.median(values):8.0f} /s   ({', '.join(f'{value:.0f}' for value in values)})", flush=True)
    return {name: statistics.median(values) for name, values in rates.items()}


def timed(run: Callable[[], Coroutine[Any, Any, int]], num: int | None = None) -> Callable[[], float]:
    """Rate of a run: `num` over its seconds, or what it returns over them."""

    def contest() -> float:
        began = time.monotonic()
        done = asyncio.run(run())
        return (done if num is None else num) / (time.monotonic() - began)

    return contest


def rss_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def without_a_model(options: argparse.Namespace) -> None:
    prompts = [new_prompt([{"role": "user", "content": f"question number {i}"}]) for i in range(options.rows)]
    tokenizer, sampling = WordTokenizer(), Sampling(max_completion_tokens=200)
    model = options.model or "target"
    with loopback("--num-tokens", "200", "--delay-s", "0.002", "--model", model) as url:
        contestants = {
            "bare AsyncOpenAI": timed(lambda: bare_openai(url, model, prompts, 200, 200), len(prompts)),
            "ours": timed(lambda: ours(url, model, prompts, 200, sampling, tokenizer), len(prompts)),
        }
        if options.model:  # the tool loads the tokenizer that the server's model name points at
            contestants["speculators regenerate-responses"] = lambda: speculators_tool(url, prompts, 200)
        rates = by_turns(options.rounds, contestants)
        print(f"ours / bare AsyncOpenAI: {rates['ours'] / rates['bare AsyncOpenAI']:.3f} (goal 0.90), rows/s at 200 in flight, answers of 200 tokens")
        many = [new_prompt([{"role": "user", "content": f"another question, number {i}"}]) for i in range(options.memory_rows)]
        asyncio.run(ours(url, model, many[:200], 200, sampling, tokenizer))
        before = rss_mib()
        asyncio.run(ours(url, model, many, 200, sampling, tokenizer))
        print(f"memory over {len(many)} rows: +{rss_mib() - before:.0f} MiB (goal < 400)")


def with_faults(options: argparse.Namespace) -> None:
    """Every prompt in one bin, none lost or doubled, against a server of which one answer in twenty is a fault."""
    prompts = [new_prompt([{"role": "user", "content": f"question number {i}"}]) for i in range(options.memory_rows)]
    outcomes: Counter[str] = Counter()
    bins: Counter[str] = Counter()

    def count(outcome: Answer | Failure) -> None:
        outcomes[outcome.prompt_id] += 1
        bins["answered" if isinstance(outcome, Answer) else outcome.kind] += 1

    with (
        loopback("--fault-rate", "0.05", "--num-tokens", "200") as url,
        tempfile.TemporaryDirectory() as folder,
        KeyedLog(Path(folder) / "answers.jsonl") as pool,
    ):
        engine = OpenAIEngine([url], "target", Sampling(max_completion_tokens=200), WordTokenizer(), concurrency=200, timeout_s=3.0)
        began = time.monotonic()
        asyncio.run(answer_prompts(prompts, engine, WordTokenizer(), pool, count))
        seconds = time.monotonic() - began
        assert set(outcomes) == {prompt.id for prompt in prompts} and set(outcomes.values()) == {1} and len(pool) == bins["answered"]
    print(f"{len(prompts)} prompts, 5 % faults, in {seconds:.0f} s: {dict(bins)}; each has exactly one outcome")
    print(f"peak memory, imports included: {rss_mib():.0f} MiB")


def with_vllm(options: argparse.Namespace) -> None:
    from eagle3.serving.vllm import ServerSettings, VLLMServer

    prompts = list(read_prompts(options.prompts))[: options.rows]
    tokenizer = load_tokenizer(options.model)
    sampling = Sampling(max_completion_tokens=options.max_tokens, max_seq_len=2048)
    settings = ServerSettings(options.model, "target", 2048, options.venv, device="cpu", max_num_seqs=64)
    longest = max(len(encode_turn(tokenizer, prompt.messages)) for prompt in prompts)
    print(f"{len(prompts)} prompts of up to {longest} tokens, answers of up to {options.max_tokens}, 64 in flight")
    with VLLMServer(settings, Path(tempfile.mkdtemp()) / "server.log") as server:
        contestants = {
            "bare aiohttp": timed(lambda: bare_aiohttp(server.base_url, "target", prompts, 64, options.max_tokens)),
            "ours": timed(lambda: ours(server.base_url, "target", prompts, 64, sampling, tokenizer)),
        }
        rates = by_turns(options.rounds, contestants)
        print(f"ours / bare aiohttp: {rates['ours'] / rates['bare aiohttp']:.3f} (goal 0.97), tokens/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=3000, help="prompts of one contest")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memory-rows", type=int, default=25_000)
    parser.add_argument("--faults", action="store_true", help="a server without a model that fails: what becomes of each prompt")
    parser.add_argument("--vllm", action="store_true", help="a real vLLM server on the CPU")
    parser.add_argument("--model", help="folder of the target; without --vllm only for its tokenizer, which speculators' tool wants")
    parser.add_argument("--prompts", help="JSONL file of prompts")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv-vllm")
    parser.add_argument("--max-tokens", type=int, default=128)
    options = parser.parse_args()
    (with_vllm if options.vllm else with_faults if options.faults else without_a_model)(options)


if __name__ == "__main__":
    main()
