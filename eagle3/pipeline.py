"""Which stage needs which: takes from the store what is there, makes what is missing, and writes what came out into the run folder."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import logging
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3 import __version__
from eagle3.comparison.results import StageSummary, collect_results, write_results
from eagle3.config import STAGES, Config, result_settings
from eagle3.errors import ConfigError, DataError
from eagle3.generation import generate, load_rows
from eagle3.progress import console, duration
from eagle3.prompts import Selection, load_prompts, read_prompts, select, write_prompts
from eagle3.store import Artifact, KeyedLog, Store, file_digest, signature, write_json
from eagle3.tracking import StageTracker, Tracker, read_metrics
from eagle3.training import remove_checkpoints

if TYPE_CHECKING:
    from eagle3.engines import Engine, Sampling
    from eagle3.targets import TargetInfo

log = logging.getLogger(__name__)

# Raised when a stage's result changes for the same settings: what older versions made is then not taken for it.
VERSIONS = {"target": 1, "prompts": 1, "generate": 1, "capture": 1, "train": 1, "evaluate": 1}
SPLITS = ("train", "evaluation")


def run(config: Config, folder: Path, run_config: Mapping[str, Any]) -> float | None:
    """Do what is missing for `config` and leave the results in `folder`.

    Returns:
        The headline acceptance length, or None if the run stops before it is measured.
    """
    return Pipeline(config, folder, run_config).run()


class Pipeline:
    """The stages of one run over one store."""

    def __init__(self, config: Config, folder: Path, run_config: Mapping[str, Any]) -> None:
        self.config, self.folder = config, folder
        self.store = Store(config.paths.store)
        self.tracker = Tracker(config.tracking, folder, run_config)
        self.stages: list[StageSummary] = []

    def run(self) -> float | None:
        self._check_inputs()
        made: dict[str, Any] = {}
        for stage in STAGES[: STAGES.index(self.config.until) + 1]:
            if stage == "prompts":
                made[stage] = self.prompts()
            elif stage == "generate":
                made[stage] = {split: self.generate(split, made["prompts"]) for split in SPLITS}
            elif stage == "capture":
                made[stage] = {split: self.capture(split, made["generate"][split]) for split in SPLITS}
            elif stage == "train":
                made[stage] = self.train(made["generate"]["train"], made["capture"]["train"])
            else:
                made[stage] = self.evaluate(made["generate"]["evaluation"], made["capture"]["evaluation"], made["train"])
        return self._report(made)

    # Stages: each says what its artifact is named by, and which module makes it.

    @functools.cached_property
    def target(self) -> TargetInfo:
        """The target's folder and shape; one that a package ships is converted into the store first."""
        from eagle3.targets import convert_gguf, read_target

        section = self.config.target
        if section.path is not None:
            return read_target(section.path)
        assert section.package is not None
        package = section.package
        version = _installed_version(package)

        def make(folder: Path, _: StageTracker) -> dict[str, Any]:
            convert_gguf(package, folder / "model")
            return {"version": version}

        artifact = self._ensure("target", {"package": package, "version": version}, {}, make)
        return read_target(artifact.path / "model")

    @functools.cached_property
    def target_signature(self) -> str:
        """What of the target can change a result: its configuration, tokenizer, and the names and sizes of its weights."""
        folder = Path(self.target.path)
        texts = {path.name: file_digest(path) for path in sorted(folder.glob("*.json")) + sorted(folder.glob("*.jinja"))}
        weights = {path.name: path.stat().st_size for path in sorted(folder.glob("*.safetensors"))}
        return signature("target", VERSIONS["target"], {"texts": texts, "weights": weights}, {})

    def prompts(self) -> Artifact:
        dataset, evaluation = self.config.dataset, self.config.evaluation
        settings: dict[str, Any] = {
            "num_train": self.config.generation.num_samples,
            "num_evaluation": evaluation.num_prompts,
            "holdout_fraction": None if evaluation.path else evaluation.holdout_fraction,
        }
        inputs = {"evaluation": file_digest(Path(evaluation.path).expanduser())} if evaluation.path else {}
        if dataset.path:
            settings["dataset"] = dataset.name
            inputs["dataset"] = file_digest(Path(dataset.path).expanduser())
        else:
            settings["dataset"] = result_settings(dataset) | {"dtype": self.config.engine.dtype}
            inputs["target"] = self.target_signature
        return self._ensure("prompts", settings, inputs, self._make_prompts)

    def _make_prompts(self, folder: Path, _: StageTracker) -> dict[str, Any]:
        selection = self._select_prompts()
        for name, chosen, asked in (
            ("training", selection.train, self.config.generation.num_samples),
            ("evaluation", selection.evaluation, self.config.evaluation.num_prompts),
        ):
            if not chosen:
                raise DataError(f"no {name} prompt is left of the dataset: give more prompts, or a file of its own by evaluation.path.")
            if len(chosen) < asked:
                log.warning("prompts: there are only %d %s prompts, not the %d asked for; all of them are used", len(chosen), name, asked)
        facts: dict[str, Any] = {"duplicates": selection.num_duplicates, "decontaminated": selection.num_decontaminated}
        for split, chosen in zip(SPLITS, (selection.train, selection.evaluation), strict=True):
            write_prompts(folder / f"{split}.jsonl", chosen)
            facts |= {split: len(chosen), f"{split}_digest": file_digest(folder / f"{split}.jsonl")}
        return facts

    def _select_prompts(self) -> Selection:
        dataset, evaluation = self.config.dataset, self.config.evaluation
        own = read_prompts(evaluation.path) if evaluation.path else None
        rest = (self.config.generation.num_samples, own, evaluation.num_prompts, evaluation.holdout_fraction)
        if dataset.path:
            return select(read_prompts(dataset.path), *rest)
        from eagle3.engines import Sampling
        from eagle3.magpie import written_prompts

        settings = result_settings(dataset) | {"dtype": self.config.engine.dtype}
        path = self.store.pool("magpie", signature("magpie", 1, settings, {"target": self.target_signature}))
        sampling = Sampling(
            dataset.temperature, dataset.top_p, dataset.max_prompt_tokens, self.config.generation.max_seq_len, self.target.eos_ids, dataset.seed
        )
        with self.store.lock(path, _say_waiting), KeyedLog(path / "prompts.jsonl") as pool:
            return select(written_prompts(self._tokenizer, self._engine(sampling), pool), *rest)

    def generate(self, split: str, prompts: Artifact) -> Artifact:
        generation = self.config.generation
        # The gate is for what is trained on: evaluation answers are all kept, so that no setting of the data moves the ruler.
        gate: dict[str, Any] = {"min_completion_tokens": generation.min_completion_tokens, "truncated": generation.truncated}
        if split == "evaluation":
            gate = {"min_completion_tokens": 2, "truncated": "keep"}
        pool_signature = self._pool_signature(split)

        def make(folder: Path, track: StageTracker) -> dict[str, Any]:
            prompts_of_split = list(load_prompts(prompts.path / f"{split}.jsonl"))
            path = self.store.pool("answers", pool_signature)
            with self.store.lock(path, _say_waiting), KeyedLog(path / "answers.jsonl") as pool:
                engine = functools.partial(self._engine, self._sampling(split))
                facts = generate(prompts_of_split, engine, lambda: self._tokenizer, pool, folder / "rows.jsonl", track, f"generate {split}", **gate)
            return facts | {"rows_digest": file_digest(folder / "rows.jsonl"), "pool": pool_signature}

        return self._ensure("generate", gate, {"prompts": prompts.facts[f"{split}_digest"], "pool": pool_signature}, make, split)

    def _pool_signature(self, split: str) -> str:
        """Answers are shared by all sample counts and gates: only what the target reads and how it samples names their pool."""
        sampling = vars(self._sampling(split)) | {"stop_ids": list(self.target.eos_ids)}
        return signature(
            "answers",
            VERSIONS["generate"],
            {"split": split, "engine": result_settings(self.config.engine), "sampling": sampling},
            {"target": self.target_signature},
        )

    def _sampling(self, split: str) -> Sampling:
        from eagle3.engines import Sampling

        generation, evaluation = self.config.generation, self.config.evaluation
        section = generation if split == "train" else evaluation
        return Sampling(section.temperature, section.top_p, section.max_completion_tokens, generation.max_seq_len, self.target.eos_ids, generation.seed)

    def capture(self, split: str, rows: Artifact) -> Artifact:
        settings = result_settings(self.config.capture) | {"aux_layers": self.aux_layers}
        pool_signature = signature("states", VERSIONS["capture"], settings, {"answers": rows.facts["pool"]})

        def make(folder: Path, track: StageTracker) -> dict[str, Any]:
            from eagle3.capture import capture_rows

            path = self.store.pool("states", pool_signature)
            held = list(load_rows(rows.path / "rows.jsonl"))
            with self.store.lock(path, _say_waiting):
                facts: dict[str, Any] = capture_rows(held, lambda: self._model, path, self.config.capture, self.aux_layers, f"capture {split}")
            track.log({f"capture/{key}": value for key, value in facts.items()})
            return facts | {"pool": pool_signature}

        return self._ensure("capture", settings, {"rows": rows.facts["rows_digest"], "pool": pool_signature}, make, split)

    def train(self, rows: Artifact, states: Artifact) -> Artifact:
        from eagle3.training.train import train

        section = self.config.training
        inputs = {"rows": rows.facts["rows_digest"], "states": states.facts["pool"], "target": self.target_signature}

        def make(folder: Path, track: StageTracker) -> dict[str, Any]:
            return train(section, self.target, load_rows(rows.path / "rows.jsonl"), self.store.pool("states", states.facts["pool"]), folder, track)

        drafter = self._ensure("train", result_settings(section), inputs, make)
        remove_checkpoints(drafter.path)
        return drafter

    def evaluate(self, rows: Artifact, states: Artifact, drafter: Artifact) -> Artifact:
        section, baseline = self.config.evaluation, self.config.baseline
        settings = {"max_k": section.max_k, "baseline": result_settings(baseline), "temperature": section.temperature}
        inputs = {"rows": rows.facts["rows_digest"], "states": states.facts["pool"], "drafter": drafter.signature}

        def make(folder: Path, track: StageTracker) -> dict[str, Any]:
            from eagle3.evaluation.evaluate import evaluate

            held_out = list(load_rows(rows.path / "rows.jsonl"))
            reports, facts = evaluate(
                section, baseline, self.config.training, held_out, self.store.pool("states", states.facts["pool"]), drafter.path / "drafter"
            )
            write_json(folder / "reports.json", [report.to_dict() for report in reports])
            track.summary({f"eval/{report.arm}/acceptance_length_k{report.k}": report.acceptance_length for report in reports} | facts)
            return facts | {"tokens": sum(report.num_tokens for report in reports)}

        return self._ensure("evaluate", settings, inputs, make)

    # What stages need of the target, loaded when the first of them asks.

    @functools.cached_property
    def _tokenizer(self) -> Any:
        from eagle3.targets import load_tokenizer

        return load_tokenizer(self.target.path, self.config.target.trust_remote_code)

    @functools.cached_property
    def _model(self) -> Any:
        from eagle3.targets import load_model

        return load_model(self.target.path, self.config.engine.dtype, self.config.engine.device, self.config.target.trust_remote_code)

    def _engine(self, sampling: Sampling) -> Engine:
        from eagle3.engines.transformers import TransformersEngine

        return TransformersEngine(self._model, sampling, batch_size=self.config.generation.concurrency)

    @functools.cached_property
    def aux_layers(self) -> list[int]:
        """The layers our drafter reads, checked against the target's depth."""
        from eagle3.targets import default_aux_layers

        layers = self.config.capture.aux_layers or list(default_aux_layers(self.target.num_layers))
        if len(set(layers)) < len(layers) or not all(1 <= layer < self.target.num_layers for layer in layers):
            raise ConfigError(
                f"capture.aux_layers={layers} must be distinct and lie in 1..{self.target.num_layers - 1}, the target has {self.target.num_layers} layers."
            )
        return layers

    # The machinery.

    def _check_inputs(self) -> None:
        """What can be known to fail before any work starts."""
        dataset, evaluation = self.config.dataset, self.config.evaluation
        for key, path in (("dataset.path", dataset.path), ("evaluation.path", evaluation.path)):
            if path and not Path(path).expanduser().is_file():
                raise DataError(f"{key}={path}: no such file.")
        target = self.target
        if self.config.training.draft_vocab_size > target.vocab_size:
            raise ConfigError(
                f"training.draft_vocab_size={self.config.training.draft_vocab_size} exceeds the target's vocabulary of {target.vocab_size}: lower it."
            )
        if self.config.generation.max_seq_len > target.max_context:
            raise ConfigError(f"generation.max_seq_len={self.config.generation.max_seq_len} exceeds the target's context of {target.max_context}: lower it.")
        log.debug("auxiliary layers %s", self.aux_layers)

    def _ensure(
        self, stage: str, settings: Mapping[str, Any], inputs: Mapping[str, str], make: Callable[[Path, StageTracker], dict[str, Any]], split: str = ""
    ) -> Artifact:
        """The artifact of these settings and inputs: from the store, or made now by `make`, which works in the artifact's folder and returns facts."""
        sig = signature(stage, VERSIONS[stage], settings, inputs)
        name = f"{stage} {split}".strip()
        artifact = self.store.find(stage, sig)
        if artifact is None:
            with self.store.lock(self.store.folder(stage, sig), _say_waiting):
                artifact = self.store.find(stage, sig)
                if artifact is None:
                    return self._make(stage, sig, name, settings, inputs, make, split)
        log.info("%s: cached, %s", name, sig)
        self._remember(artifact, "cached", split)
        return artifact

    def _make(self, stage: str, sig: str, name: str, settings: Any, inputs: Any, make: Callable[[Path, StageTracker], dict[str, Any]], split: str) -> Artifact:
        folder = self.store.folder(stage, sig)
        log.info("%s: making %s", name, sig)
        began = time.monotonic()
        with self.tracker.stage(stage, sig, folder) as track:
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

    def _report(self, made: Mapping[str, Any]) -> float | None:
        """Write results.json and the picture, show the tables; after an early stop, say where the last artifact is."""
        if all(stage["status"] == "cached" for stage in self.stages):
            log.info("everything was in the store already, nothing had to be made")
        if self.config.until != "evaluate":
            last = made[self.config.until]
            for artifact in last.values() if isinstance(last, dict) else [last]:
                log.info("stopped after until=%s: %s", self.config.until, artifact.path)
            return None
        from eagle3.comparison.plots import plot_run
        from eagle3.comparison.table import results_table, stages_table
        from eagle3.evaluation.report import AcceptanceReport

        reports = [AcceptanceReport.from_dict(report) for report in json.loads((made["evaluate"].path / "reports.json").read_text())]
        results = collect_results(
            reports, "ours", self.config.evaluation.k, self.stages, str(made["train"].path / "drafter"), made["evaluate"].facts["vocabulary_coverage"]
        )
        write_results(self.folder, results, reports)
        plot_run(results, read_metrics(made["train"].path), self.folder / "results.png")
        console.print(stages_table(results))
        console.print(results_table(results))
        log.info("results: %s", self.folder)
        return next(report.acceptance_length for report in reports if report.arm == "ours" and report.k == self.config.evaluation.k)


def _say_waiting(holder: str) -> None:
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
