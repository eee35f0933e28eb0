"""A vLLM server for the time of a `with` block: on the loopback, in a process group of its own, gone when we are gone, however we go."""

from __future__ import annotations

import contextlib
import http.client
import logging
import os
import shlex
import signal
import socket
import subprocess
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from eagle3.config import EngineConfig, TargetConfig
from eagle3.errors import EngineError

log = logging.getLogger(__name__)

HOST = "127.0.0.1"
STOP_S = 15.0  # from the request to stop to the end by force
LOG_TAIL_LINES = 25
CPU_ENV = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
QUIET_ENV = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
# Reads until our end of the pipe closes, which the system sees to even after kill -9, then ends the server's process group.
WATCHER = 'read _; kill -s INT -- "-$1"; sleep "$2"; kill -s KILL -- "-$1"'


@dataclass(frozen=True)
class Command:
    """How a server is started; as text, a line for a shell."""

    argv: tuple[str, ...]
    env: dict[str, str]  # beside our own environment

    def __str__(self) -> str:
        return " ".join([*(f"{key}={shlex.quote(value)}" for key, value in self.env.items()), shlex.join(self.argv)])


@dataclass(frozen=True)
class ServerSettings:
    """What a vLLM server is started with.

    Args:
        venv: folder of the virtual environment that holds vLLM; None takes `vllm` from the PATH.
        device: cpu or cuda.
        kv_cache_gib: size of the key/value cache on a CPU, in GiB; a GPU's is what its memory leaves.
        extra_args: passed on as they are, like ("--reasoning-parser", "kimi_k2").
    """

    model: str | Path
    name: str
    max_model_len: int
    venv: Path | None = None
    device: str = "cuda"
    dtype: str = "bfloat16"
    max_num_seqs: int = 64
    kv_cache_gib: float = 2
    trust_remote_code: bool = False
    extra_args: tuple[str, ...] = ()
    extra_env: dict[str, str] = field(default_factory=dict)
    ready_timeout_s: float = 1800.0

    def with_args(self, *args: str) -> ServerSettings:
        """The same with further arguments."""
        return replace(self, extra_args=(*self.extra_args, *args))


def target_settings(target: TargetConfig, engine: EngineConfig, model: str | Path, max_model_len: int, max_num_seqs: int) -> ServerSettings:
    """A server of the target at `model`, started as the engine's section says."""
    return ServerSettings(
        model=model,
        name=engine.model or target.name,
        max_model_len=max_model_len,
        venv=None if engine.venv is None else Path(engine.venv).expanduser(),
        device="cpu" if engine.name == "vllm_cpu" else "cuda",
        dtype=engine.dtype,
        max_num_seqs=max_num_seqs,
        trust_remote_code=target.trust_remote_code,
        extra_args=tuple(engine.server_args),
        ready_timeout_s=engine.ready_timeout_s,
    )


def command(settings: ServerSettings, port: int) -> Command:
    """The command line and environment of a server.

    Raises:
        EngineError: the virtual environment holds no such program.
    """
    is_cpu = settings.device == "cpu"
    # The CPU build carries another package name, on which the `vllm` command fails.
    program, start = ("python", ["-m", "vllm.entrypoints.openai.api_server", "--model"]) if is_cpu else ("vllm", ["serve"])
    if settings.venv is not None:
        path = settings.venv.absolute() / "bin" / program
        if not path.exists():
            raise EngineError(f"{settings.venv} holds no vLLM ({path} is missing): run `make vllm`, or set engine.venv to the environment that has it.")
        program = str(path)
    argv = [program, *start, str(settings.model), "--served-model-name", settings.name, "--host", HOST, "--port", str(port)]
    argv += ["--dtype", settings.dtype, "--max-model-len", str(settings.max_model_len), "--max-num-seqs", str(settings.max_num_seqs)]
    argv += ["--uvicorn-log-level", "warning"]
    if settings.trust_remote_code:
        argv.append("--trust-remote-code")
    env = dict(QUIET_ENV)
    if Path(settings.model).is_dir():
        env["HF_HUB_OFFLINE"] = "1"
    if is_cpu:
        env |= CPU_ENV | {"VLLM_CPU_KVCACHE_SPACE": f"{settings.kv_cache_gib:g}"}
        # Intel's OpenMP nearly doubles the speed of a single request over GNU's.
        if settings.venv is not None and (openmp := settings.venv.absolute() / "lib" / "libiomp5.so").exists():
            env["LD_PRELOAD"] = str(openmp)
    return Command((*argv, *settings.extra_args), env | settings.extra_env)


class VLLMServer:
    """Starts a server on entering, waits until it answers, and stops it on leaving. If we are killed, a watcher stops it.

    Args:
        log_path: file of the server's output; replaced.
    """

    def __init__(self, settings: ServerSettings, log_path: Path) -> None:
        self.settings, self.log_path, self.port = settings, log_path, 0

    @property
    def base_url(self) -> str:
        return f"http://{HOST}:{self.port}/v1"

    def __enter__(self) -> Self:
        """Start the server.

        Raises:
            EngineError: it ended or is not ready in time; the end of its log is in the message.
        """
        self.port = _free_port()
        started = command(self.settings, self.port)
        log.info("starting %s (log: %s)", started, self.log_path)
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        # Its own key would lock us out, and it listens to this machine alone.
        env = {key: value for key, value in os.environ.items() if key != "VLLM_API_KEY"} | started.env
        began = time.monotonic()
        try:
            with self.log_path.open("wb") as output:
                self._process = subprocess.Popen(
                    started.argv, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
                )
        except OSError as error:
            raise EngineError(
                f"{started.argv[0]} can't be started ({error.strerror}): install vLLM, or set engine.venv to the environment that has it."
            ) from None
        try:
            self._watcher = _watch(self._process.pid)
            self._wait_until_ready(began)
        except BaseException:  # Ctrl-C included
            self.stop()
            raise
        log.info("the server is ready after %.0f s", time.monotonic() - began)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End the server and all its processes: asked first, then by force."""
        _signal_group(self._process.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_S)
        _signal_group(self._process.pid, signal.SIGKILL)  # whatever of the group is left
        self._process.wait()
        if hasattr(self, "_watcher"):
            self._watcher.kill()
            self._watcher.communicate()

    def _wait_until_ready(self, began: float) -> None:
        while not _is_healthy(self.port):
            if (code := self._process.poll()) is not None:
                raise EngineError(f"the vLLM server ended with status {code} before it was ready. {self._log_tail()}")
            if time.monotonic() - began > self.settings.ready_timeout_s:
                raise EngineError(f"the vLLM server is not ready after engine.ready_timeout_s={self.settings.ready_timeout_s:g} s. {self._log_tail()}")
            time.sleep(0.2)

    def _log_tail(self) -> str:
        lines = self.log_path.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_TAIL_LINES:]
        return "\n".join([f"The end of {self.log_path}:", *lines])


def _watch(group: int) -> subprocess.Popen[bytes]:
    """A shell that ends the process group when we end; in a session of its own, so that no Ctrl-C reaches it."""
    return subprocess.Popen(
        ["/bin/sh", "-c", WATCHER, "watcher", str(group), f"{STOP_S:g}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _signal_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def _is_healthy(port: int) -> bool:
    connection = http.client.HTTPConnection(HOST, port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
