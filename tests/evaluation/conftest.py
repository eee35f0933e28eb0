"""A loopback server that streams as a speculating vLLM does, several ids to a chunk, counts as it does, and fails on purpose."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import pytest
from aiohttp import web

from eagle3.conversation import Row
from eagle3.drafter.model import new_drafter, save_drafter
from eagle3.drafter.vocabulary import build_vocabulary_map
from eagle3.targets import TargetInfo, read_target

STEP_ACCEPTS = (2, 0, 3, 1)  # accepted drafts of successive steps; the last one may lie past the answer's end


class SpeculatingServer:
    """Answers n + 1 ids to a prompt of n, all steps of k=3 drafts; `fault` is one of the faults below, at the `fault_at`-th request."""

    def __init__(self, fault: str = "", fault_at: int = 5, drift: int = 0) -> None:
        self.fault, self.fault_at, self.drift = fault, fault_at, drift
        self.bodies: list[dict[str, Any]] = []
        self.generated, self.drafts, self.accepted, self.created = 500, 20, [9, 5, 1], 1.5e9  # what others had asked before
        self.in_flight = self.max_in_flight = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        fault = self.fault if len(self.bodies) == self.fault_at else ""
        if fault == "refuse":
            return web.json_response({"error": "prompt too long"}, status=400)
        ids = [(token + self.drift) % 1000 for token in (*body["prompt"], 2)][: body["max_tokens"]]
        self.in_flight += 1
        self.max_in_flight = max(self.in_flight, self.max_in_flight)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await self._chunk(response, ids[:1], fault)
        position, step = 1, 0
        while position < len(ids):
            accepted = STEP_ACCEPTS[step % len(STEP_ACCEPTS)]
            self.drafts += 1
            self.accepted = [count + (place < accepted) for place, count in enumerate(self.accepted)]
            await self._chunk(response, ids[position : position + accepted + 1], fault)
            position, step = position + accepted + 1, step + 1
        if fault == "restart":
            self.generated, self.drafts, self.accepted, self.created = 900, 900, [900] * 3, self.created + 60
        if fault == "others":
            self.generated += 7
        self.generated += len(ids)
        self.in_flight -= 1
        if fault == "cut":
            request.transport.abort()  # type: ignore[union-attr]
            return response
        await response.write(f"data: {json.dumps({'choices': [], 'usage': {'completion_tokens': len(ids)}})}\n\ndata: [DONE]\n\n".encode())
        return response

    async def _chunk(self, response: web.StreamResponse, ids: list[int], fault: str) -> None:
        await asyncio.sleep(0.002)
        choice = {"index": 0, "text": "x" * len(ids)} | ({} if fault == "no_ids" else {"token_ids": ids})
        await response.write(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())

    async def _metrics(self, _: web.Request) -> web.Response:
        names = {"vllm:generation_tokens": self.generated, "vllm:spec_decode_num_drafts": self.drafts}
        names |= {"vllm:spec_decode_num_draft_tokens": 3 * self.drafts, "vllm:spec_decode_num_accepted_tokens": sum(self.accepted)}
        lines = [f'# TYPE {name} counter\n{name}_total{{engine="0"}} {value}' for name, value in names.items()]
        lines.append(f'vllm:generation_tokens_created{{engine="0"}} {self.created}\n# TYPE vllm:spec_decode_num_accepted_tokens_per_pos counter')
        lines += [f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="{i}"}} {count}' for i, count in enumerate(self.accepted)]
        return web.Response(text="\n".join(lines) + "\n")

    def __enter__(self) -> Self:
        started = threading.Event()

        async def serve() -> None:
            self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
            app = web.Application()
            app.router.add_post("/v1/completions", self._complete)
            app.router.add_get("/metrics", self._metrics)
            runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            self.port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
            started.set()
            await self._stop.wait()
            await runner.cleanup()

        self._thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
        self._thread.start()
        assert started.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)


@pytest.fixture
def asked_rows() -> list[Row]:
    """Twelve prompts of 8 to 30 tokens; their answers are not read when they are asked live."""
    lengths = (8 + 2 * index for index in range(12))
    return [Row(f"p{i}-0", f"p{i}", 0, [*list(range(100 + i, 100 + i + n)), 7], [0] * n + [1], "chat") for i, n in enumerate(lengths)]


@pytest.fixture
def speculating_server() -> Callable[..., SpeculatingServer]:
    return SpeculatingServer


@pytest.fixture(scope="session")
def small_target(tmp_path_factory: pytest.TempPathFactory) -> TargetInfo:
    """A random llama on disk."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(4)
    shape: dict[str, Any] = {
        "hidden_size": 64,
        "vocab_size": 500,
        "num_hidden_layers": 6,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    folder = tmp_path_factory.mktemp("target")
    LlamaForCausalLM(LlamaConfig(**shape, max_position_embeddings=512)).save_pretrained(folder)
    return read_target(folder)


@pytest.fixture
def small_drafter(small_target: TargetInfo, tmp_path: Path) -> Path:
    """An untrained drafter for it, which the test may damage."""
    drafter = new_drafter(str(small_target.path), [2, 3, 4], build_vocabulary_map(dict.fromkeys(range(100), 1), 120, 500))
    save_drafter(drafter, tmp_path / "drafter")
    return tmp_path / "drafter"
