"""A server for a finished run: its target with the drafter it made, at the k that is expected to be fastest."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from eagle3.comparison.results import Results, read_results
from eagle3.config import Config, EngineConfig, ServeConfig
from eagle3.drafter.model import load_drafter
from eagle3.errors import ConfigError, EngineError
from eagle3.serving.speculation import Speculation
from eagle3.serving.vllm import HOST, Command, command, target_settings

log = logging.getLogger(__name__)


def serve_command(config: Config, run: Config) -> Command:
    """How the server is started.

    Args:
        config: the command line's; its `serve` section chooses, and its engine runs the server if that is a vLLM.
        run: the configuration of the run that made the drafter.

    Raises:
        ConfigError: neither of the two has a vLLM engine.
        DataError, DrafterError, EngineError: the run is not finished, its drafter is damaged, or there is no vLLM.
    """
    section = config.serve
    results = read_results(Path(section.run))
    folder = Path(results["drafter"])
    load_drafter(folder)  # a damaged one is refused here, with the reason
    engine = _engine(config, run)
    target = json.loads((folder / "config.json").read_text(encoding="utf-8"))["speculators_config"]["verifier"]["name_or_path"]
    settings = target_settings(run.target, engine, target, run.generation.max_seq_len, run.generation.concurrency)
    return command(settings.with_args(*Speculation(choose_k(section, results), folder).args), section.port)


def serve(config: Config, run: Config) -> NoReturn:
    """Become the server, or print its command line and leave.

    Raises:
        As `serve_command`; EngineError also if the program can't be started.
    """
    started = serve_command(config, run)
    if config.serve.print_only:
        print(started)
        sys.exit(0)
    log.info("http://%s:%d/v1 is served by: %s", HOST, config.serve.port, started)
    try:
        os.execvpe(started.argv[0], started.argv, os.environ | started.env)
    except OSError as error:
        raise EngineError(f"{started.argv[0]} can't be started ({error.strerror}): install vLLM, or set engine.venv to the environment that has it.") from None


def choose_k(section: ServeConfig, results: Results) -> int:
    """The k asked for, or the best one for the measured concurrency that is nearest, or the one the run was evaluated at."""
    if section.k is not None:
        return section.k
    best: Mapping[str, int] = results["best_k"]
    if not best:
        log.info("k=%d, which the run was evaluated at: it has no live measurement to choose by", results["k"])
        return results["k"]
    nearest = min(best, key=lambda concurrency: abs(math.log(int(concurrency) / section.concurrency)))
    log.info("k=%d, the best one for %s requests in flight by the run's measurements", best[nearest], nearest)
    return best[nearest]


def _engine(config: Config, run: Config) -> EngineConfig:
    """The engine that runs the server; of another machine's, only that it is a vLLM is known."""
    chosen = next((engine for engine in (config.engine, run.engine) if engine.name in ("vllm", "vllm_cpu")), None)
    if config.serve.print_only:
        return dataclasses.replace(chosen or EngineConfig(name="vllm"), venv=None)
    if chosen is None:
        raise ConfigError("eagle3 serve needs a vLLM: add engine=vllm (GPUs) or engine=vllm_cpu, or serve.print_only=true for another machine.")
    return chosen
