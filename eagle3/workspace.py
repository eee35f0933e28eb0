"""What the stages of one run work with: the store, the target, an engine; and how an artifact is made once and found again."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import logging
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3 import __version__
from eagle3.comparison.results import StageSummary
from eagle3.config import STAGES, Config, result_settings
from eagle3.errors import ConfigError
from eagle3.progress import duration
from eagle3.store import Artifact, Store, file_digest, signature
from eagle3.tracking import StageTracker, Tracker

if TYPE_CHECKING:
    from eagle3.engines import Engine, Sampling
    from eagle3.evaluation.arms import Arm
    from eagle3.serving.vllm import ServerSettings, VLLMServer
    from eagle3.targets import TargetInfo

log = logging.getLogger(__name__)

# Raised when a stage's result changes for the same settings: what older versions made is then not taken for it.
VERSIONS = {"target": 1, "prompts": 2, "generate": 2, "capture": 1, "train": 1, "evaluate": 1, "live": 1}


class Workspace:
    """One run's access to everything. The target's weights, its tokenizer and a server are loaded or started when a stage first needs them."""

    def __init__(self, config: Config, folder: Path, run_config: Mapping[str, Any]) -> None:
        self.config, self.folder = config, folder
        self.store = Store(config.paths.store)
        self.stages: list[StageSummary] = []
        self._tracker = Tracker(config.tracking, folder, run_config)
        self._servers = contextlib.ExitStack()

    def stop_servers(self) -> None:
        """Stop what was started for generation: what comes next needs the memory and the cores."""
        self._servers.close()
        self.__dict__.pop("_server", None)

    @functools.cached_property
    def target(self) -> TargetInfo:
        """The target's folder and shape; one that a package ships is converted into the store first."""
        from eagle3.targets import convert_gguf, fetch_target, read_target

        section = self.config.target
        if section.path is not None:
            return read_target(fetch_target(section.path, weights=self._runs_here))
        assert section.package is not None
        package = section.package
        version = _installed_version(package)

        def make(folder: Path, _: StageTracker) -> dict[str, Any]:
            convert_gguf(package, folder / "model")
            return {"version": version}

        artifact = self.ensure("target", {"package": package, "version": version}, {}, make)
        return read_target(artifact.path / "model")

    @property
    def _runs_here(self) -> bool:
        """Whether this machine runs the target, and so needs its weights."""
        stages = STAGES.index(self.config.until)
        return self.config.engine.name != "openai" or stages >= STAGES.index("capture")

    @functools.cached_property
    def target_signature(self) -> str:
        """What of the target can change a result: its configuration, tokenizer, code and weights; of a hub's, the commit."""
        from eagle3.targets import DESCRIPTION_FILES, WEIGHTS_FILES, weights_digest

        folder = Path(self.target.path)
        if folder.parent.name == "snapshots":  # the weights may not be here yet, and must not change the name when they come
            return signature("target", VERSIONS["target"], {"commit": folder.name}, {})
        texts = {path.name: file_digest(path) for pattern in DESCRIPTION_FILES for path in folder.glob(pattern)}
        weights = {path.name: weights_digest(path) for pattern in WEIGHTS_FILES for path in folder.glob(pattern)}
        return signature("target", VERSIONS["target"], {"texts": texts, "weights": weights}, {})

    @property
    def engine_settings(self) -> dict[str, Any]:
        """What of the engine can change an answer: a server that is started and one that is there are the same thing."""
        engine = self.config.engine
        return {"kind": "transformers" if engine.name == "transformers" else "server", **result_settings(engine)}

    @functools.cached_property
    def tokenizer(self) -> Any:
        from eagle3.targets import load_tokenizer

        return load_tokenizer(self.target.path, self.config.target.trust_remote_code)

    @functools.cached_property
    def model(self) -> Any:
        from eagle3.targets import load_model

        return load_model(self.target.path, self.config.engine.dtype, self.config.engine.device, self.config.target.trust_remote_code)

    def release_model(self) -> None:
        """Give the memory of the target in this process back: a server that comes next needs it."""
        if self.__dict__.pop("model", None) is not None:
            import torch

            torch.cuda.empty_cache()

    def engine(self, sampling: Sampling) -> Engine:
        engine, generation = self.config.engine, self.config.generation
        if engine.name == "transformers":
            from eagle3.engines.transformers import TransformersEngine

            return TransformersEngine(self.model, sampling, batch_size=generation.concurrency)
        from eagle3.engines.openai import OpenAIEngine

        return OpenAIEngine(
            engine.base_urls if engine.name == "openai" else [self._server.base_url],
            self.served_name,
            sampling,
            self.tokenizer,
            concurrency=generation.concurrency,
            timeout_s=generation.timeout_s,
            max_retries=engine.max_retries,
            api_key_env=engine.api_key_env,
            think_tokens=self.config.target.think_tokens,
        )

    @functools.cached_property
    def _server(self) -> VLLMServer:
        """A vLLM server of ours, started when the first prompt needs it and stopped when generation is over."""
        from eagle3.serving.vllm import VLLMServer

        return self._servers.enter_context(VLLMServer(self._server_settings(self.config.generation.concurrency), self.folder / "vllm.log"))

    def _server_settings(self, max_num_seqs: int) -> ServerSettings:
        from eagle3.serving.vllm import target_settings

        return target_settings(self.config.target, self.config.engine, self.target.path, self.config.generation.max_seq_len, max_num_seqs)

    @property
    def served_name(self) -> str:
        """What servers call the target."""
        return self.config.engine.model or self.config.target.name

    @contextlib.contextmanager
    def live_server(self, arm: Arm) -> Iterator[str]:
        """The base URL of a server for one arm: one that runs already, or one of ours for the time of the context."""
        from eagle3.serving.vllm import VLLMServer

        evaluation = self.config.evaluation
        if arm.key in evaluation.live_urls:
            yield evaluation.live_urls[arm.key]
            return
        settings = self._server_settings(max(evaluation.concurrencies)).with_args(*(arm.speculation.args if arm.speculation else ()))
        with VLLMServer(settings, self.folder / f"vllm-{arm.name}-{arm.k}.log") as server:
            yield server.base_url

    @functools.cached_property
    def aux_layers(self) -> list[int]:
        """The layers our drafter reads, those of its checkpoint if it goes on from one, checked against the target's depth."""
        from eagle3.targets import default_aux_layers

        layers, init = self.config.capture.aux_layers, self.config.training.init
        if init is not None:
            from eagle3.drafter.pretrained import aux_layers, fetch_drafter

            read = aux_layers(fetch_drafter(init), self.target.num_layers)
            if layers is not None and layers != read:
                raise ConfigError(f"capture.aux_layers={layers}, but the drafter of training.init={init} reads {read}: leave capture.aux_layers null.")
            layers = read
        elif layers is not None and layers != sorted(layers):
            raise ConfigError(f"capture.aux_layers={layers} must ascend: servers hand the layers to the drafter in the order of the target, lowest first.")
        layers = layers or list(default_aux_layers(self.target.num_layers))
        if len(set(layers)) < len(layers) or not all(1 <= layer < self.target.num_layers for layer in layers):
            raise ConfigError(
                f"capture.aux_layers={layers} must be distinct and lie in 1..{self.target.num_layers - 1}, the target has {self.target.num_layers} layers."
            )
        return layers

    def ensure(
        self, stage: str, settings: Mapping[str, Any], inputs: Mapping[str, str], make: Callable[[Path, StageTracker], dict[str, Any]], split: str = ""
    ) -> Artifact:
        """The artifact of these settings and inputs: from the store, or made now by `make`, which works in the artifact's folder and returns facts.

        One whose facts say that something `may_pass` when tried again is made again: what it has already is in its pool.
        """
        sig = signature(stage, VERSIONS[stage], settings, inputs)
        name = f"{stage} {split}".strip()
        artifact = self.store.find(stage, sig)
        if artifact is None or artifact.facts.get("may_pass"):
            with self.store.lock(self.store.folder(stage, sig), say_waiting):
                artifact = self.store.find(stage, sig)
                if artifact is not None and artifact.facts.get("may_pass"):
                    self.store.reopen(artifact)
                    artifact = None
                if artifact is None:
                    return self._make(stage, sig, name, settings, inputs, make, split)
        log.info("%s: cached, %s", name, sig)
        self._remember(artifact, "cached", split)
        return artifact

    def _make(self, stage: str, sig: str, name: str, settings: Any, inputs: Any, make: Callable[[Path, StageTracker], dict[str, Any]], split: str) -> Artifact:
        folder = self.store.folder(stage, sig)
        log.info("%s: making %s", name, sig)
        began = time.monotonic()
        with self._tracker.stage(stage, sig, folder) as track:
            facts = make(folder, track)
            seconds = time.monotonic() - began
            track.summary({f"cost/{stage}_seconds": seconds} | {key: value for key, value in facts.items() if isinstance(value, int | float | str)})
        num_bytes = facts["bytes"] if "bytes" in facts else sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        manifest = {"settings": settings, "inputs": inputs, "facts": facts, "seconds": seconds, "bytes": num_bytes, "made_by": _provenance()}
        artifact = self.store.finish(stage, sig, manifest)
        numbers = ", ".join(f"{key} {value}" for key, value in facts.items() if isinstance(value, int))
        log.info("%s: done in %s%s", name, duration(seconds), f" ({numbers})" if numbers else "")
        self._remember(artifact, "made", split)
        return artifact

    def _remember(self, artifact: Artifact, status: str, split: str) -> None:
        manifest = artifact.manifest
        self.stages.append(
            StageSummary(
                stage=artifact.stage,
                split=split,
                status=status,
                seconds=manifest["seconds"],
                tokens=artifact.facts.get("tokens", 0),
                bytes=manifest["bytes"],
                signature=artifact.signature,
            )
        )


def say_waiting(holder: str) -> None:
    log.info("another run works on the same thing (%s); waiting for it", holder)


def _installed_version(package: str) -> str:
    try:
        return importlib.metadata.version(package.replace("_", "-"))
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(
            f"target.package={package} is not installed: run `make` in the checkout, or pip install --no-deps {package.replace('_', '-')}."
        ) from None


def _provenance() -> dict[str, str]:
    """Versions that made an artifact, and the commit when it was made from a checkout."""
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "speculators")}
    git = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return {"eagle3": __version__, "commit": git.stdout.strip() or "unknown", "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **versions}
