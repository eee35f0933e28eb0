"""Which stage needs which: takes from the store what is there, makes what is missing, and writes what came out into the run folder."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3.comparison.results import collect_results, write_results
from eagle3.config import STAGES, Config, result_settings
from eagle3.errors import ConfigError, DataError, StoreError
from eagle3.generation import generate, load_rows
from eagle3.hidden_states import StateReader
from eagle3.progress import console
from eagle3.prompts import Selection, load_prompts, read_hub, read_prompts, select, shuffled, write_prompts
from eagle3.store import Artifact, KeyedLog, file_digest, signature, write_json
from eagle3.tracking import StageTracker, read_metrics
from eagle3.training import remove_checkpoints
from eagle3.workspace import VERSIONS, Workspace, say_waiting

if TYPE_CHECKING:
    from eagle3.conversation import Row
    from eagle3.engines import Sampling
    from eagle3.evaluation.baseline import Baseline

log = logging.getLogger(__name__)

SPLITS = ("train", "evaluation")
SYNTHETIC = "the target wrote the evaluation prompts itself; real ones (evaluation.path) may be accepted less"


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
        self.workspace = Workspace(config, folder, run_config)

    def run(self) -> float | None:
        try:
            return self._run()
        finally:
            self.workspace.stop_servers()

    def _run(self) -> float | None:
        self._check_inputs()
        made: dict[str, Any] = {}
        for stage in STAGES[: STAGES.index(self.config.until) + 1]:
            if stage == "prompts":
                made[stage] = self.prompts()
            elif stage == "generate":
                made[stage] = {split: self.generate(split, made["prompts"]) for split in SPLITS}
                self.workspace.stop_servers()
                self._show_generation(made[stage])
            elif stage == "capture":
                made[stage] = {split: self.capture(split, made["generate"][split]) for split in SPLITS}
            elif stage == "train":
                made[stage] = self.train(made["generate"]["train"], made["capture"]["train"])
            else:
                made[stage] = self.evaluate(made["generate"]["evaluation"], made["capture"]["evaluation"], made["train"])
                if self.config.evaluation.live:
                    made["live"] = self.live(made["generate"]["evaluation"], made["train"])
        return self._report(made)

    # Stages: each says what its artifact is named by, and which module makes it.

    def prompts(self) -> Artifact:
        dataset, evaluation = self.config.dataset, self.config.evaluation
        settings: dict[str, Any] = {
            "num_train": self.config.generation.num_samples,
            "num_evaluation": evaluation.num_prompts,
            "holdout_fraction": None if evaluation.path else evaluation.holdout_fraction,
        }
        inputs = {"evaluation": file_digest(Path(evaluation.path).expanduser())} if evaluation.path else {}
        if dataset.name == "file":
            settings |= {"shuffle_seed": dataset.shuffle_seed}
            inputs["dataset"] = file_digest(Path(str(dataset.path)).expanduser())
        elif dataset.name == "hub":
            settings |= {key: getattr(dataset, key) for key in ("path", "subset", "split", "revision", "streaming", "shuffle_seed")}
        else:
            settings |= self._magpie_settings
            inputs["target"] = self.workspace.target_signature
        return self.workspace.ensure("prompts", settings, inputs, self._make_prompts)

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
        rest: Any = (self.config.generation.num_samples, own, evaluation.num_prompts, evaluation.holdout_fraction)
        if dataset.name != "magpie":
            path = str(dataset.path)
            if dataset.name == "hub":
                return select(read_hub(path, dataset.subset, dataset.split, dataset.revision, dataset.streaming, dataset.shuffle_seed), *rest)
            prompts = read_prompts(path)
            return select(prompts if dataset.shuffle_seed is None else shuffled(prompts, dataset.shuffle_seed), *rest)
        from eagle3.engines import Sampling
        from eagle3.magpie import written_prompts

        folder = self.workspace.store.pool("magpie", signature("magpie", 1, self._magpie_settings, {"target": self.workspace.target_signature}))
        sampling = Sampling(
            dataset.temperature, dataset.top_p, dataset.max_prompt_tokens, self.config.generation.max_seq_len, self.workspace.target.eos_ids, dataset.seed
        )
        with self.workspace.store.lock(folder, say_waiting), KeyedLog(folder / "prompts.jsonl") as pool:
            return select(written_prompts(self.workspace.tokenizer, self.workspace.engine(sampling), pool), *rest)

    @property
    def _magpie_settings(self) -> dict[str, Any]:
        dataset = self.config.dataset
        return {key: getattr(dataset, key) for key in ("temperature", "top_p", "max_prompt_tokens", "seed")} | self.workspace.engine_settings

    def generate(self, split: str, prompts: Artifact) -> Artifact:
        generation = self.config.generation
        # The gate is for what is trained on: evaluation answers are all kept, so that no setting of the data moves the ruler.
        gate: dict[str, Any] = {"min_completion_tokens": generation.min_completion_tokens, "truncated": generation.truncated}
        if split == "evaluation":
            gate = {"min_completion_tokens": 2, "truncated": "keep"}
        pool_signature = self._pool_signature(split)

        def make(folder: Path, track: StageTracker) -> dict[str, Any]:
            prompts_of_split = list(load_prompts(prompts.path / f"{split}.jsonl"))
            path = self.workspace.store.pool("answers", pool_signature)
            with self.workspace.store.lock(path, say_waiting), KeyedLog(path / "answers.jsonl") as pool:
                engine = functools.partial(self.workspace.engine, self._sampling(split))
                facts = generate(
                    prompts_of_split,
                    engine,
                    lambda: self.workspace.tokenizer,
                    pool,
                    folder / "rows.jsonl",
                    track,
                    f"generate {split}",
                    **gate,
                    think_tokens=self.config.target.think_tokens,
                )
            return facts | {"rows_digest": file_digest(folder / "rows.jsonl"), "pool": pool_signature}

        return self.workspace.ensure("generate", gate, {"prompts": prompts.facts[f"{split}_digest"], "pool": pool_signature}, make, split)

    def _pool_signature(self, split: str) -> str:
        """Answers are shared by all sample counts and gates: only what the target reads and how it samples names their pool."""
        sampling = vars(self._sampling(split)) | {"stop_ids": list(self.workspace.target.eos_ids)}
        if not sampling["temperature"]:  # greedy answers depend on neither
            sampling |= {"top_p": 1.0, "seed": 0}
        return signature(
            "answers",
            VERSIONS["generate"],
            {"split": split, "engine": self.workspace.engine_settings, "sampling": sampling, "think_tokens": self.config.target.think_tokens},
            {"target": self.workspace.target_signature},
        )

    def _sampling(self, split: str) -> Sampling:
        from eagle3.engines import Sampling

        generation, evaluation = self.config.generation, self.config.evaluation
        section = generation if split == "train" else evaluation
        return Sampling(
            section.temperature, section.top_p, section.max_completion_tokens, generation.max_seq_len, self.workspace.target.eos_ids, generation.seed
        )

    def capture(self, split: str, rows: Artifact) -> Artifact:
        settings = result_settings(self.config.capture) | {"aux_layers": self.workspace.aux_layers}
        pool_signature = signature("states", VERSIONS["capture"], settings, {"answers": rows.facts["pool"]})

        def make(folder: Path, track: StageTracker) -> dict[str, Any]:
            facts = self._capture(split, list(load_rows(self._rows(rows))), pool_signature)
            track.log({f"capture/{key}": value for key, value in facts.items()})
            return facts | {"pool": pool_signature}

        return self.workspace.ensure("capture", settings, {"rows": rows.facts["rows_digest"], "pool": pool_signature}, make, split)

    def _capture(self, split: str, rows: Sequence[Row], pool_signature: str) -> dict[str, Any]:
        from eagle3.capture import capture_rows

        path = self.workspace.store.pool("states", pool_signature)
        temperature = self._sampling(split).temperature
        with self.workspace.store.lock(path, say_waiting):
            return capture_rows(rows, lambda: self.workspace.model, path, self.config.capture, self.workspace.aux_layers, temperature, f"capture {split}")

    def _rows(self, artifact: Artifact) -> Path:
        """The file of an artifact's rows, for a stage that is about to read them.

        Raises:
            StoreError: it is not what was written.
        """
        path = artifact.path / "rows.jsonl"
        if not path.is_file() or file_digest(path) != artifact.facts["rows_digest"]:
            raise StoreError(f"{path} is not what was written there: delete the folder {artifact.path}, and the next run makes it again from its answers.")
        return path

    def _states(self, split: str, rows: Artifact, states: Artifact) -> Path:
        """The pool of the states of these rows; what somebody deleted from it, because it was damaged or big, is captured again."""
        path = self.workspace.store.pool("states", states.facts["pool"])
        reader, held = StateReader(path), list(load_rows(self._rows(rows)))
        missing = sum(row.id not in reader for row in held)
        if missing:
            log.info("capture %s: the states of %d rows are no longer there; they are captured again", split, missing)
            self._capture(split, held, states.facts["pool"])
        return path

    def train(self, rows: Artifact, states: Artifact) -> Artifact:
        from eagle3.training.train import train

        section, settings = self.config.training, result_settings(self.config.training)
        inputs = {"rows": rows.facts["rows_digest"], "states": states.facts["pool"], "target": self.workspace.target_signature}
        if section.init is not None:
            from eagle3.drafter.pretrained import drafter_digest, fetch_drafter

            inputs["init"] = drafter_digest(fetch_drafter(section.init))
            settings["init"] = None  # the content counts, not the name

        def make(folder: Path, track: StageTracker) -> dict[str, Any]:
            pool = self._states("train", rows, states)
            return train(section, self.workspace.target, rows.path / "rows.jsonl", pool, folder, track)

        drafter = self.workspace.ensure("train", settings, inputs, make)
        remove_checkpoints(drafter.path)
        return drafter

    def evaluate(self, rows: Artifact, states: Artifact, drafter: Artifact) -> Artifact:
        section, baseline = self.config.evaluation, self.config.baseline
        settings = {"max_k": section.max_k, "baseline": self._baseline_settings, "temperature": section.temperature}
        inputs = {"rows": rows.facts["rows_digest"], "states": states.facts["pool"], "drafter": drafter.signature} | self._baseline_inputs

        def make(folder: Path, track: StageTracker) -> dict[str, Any]:
            from eagle3.evaluation.evaluate import evaluate

            pool = self._states("evaluation", rows, states)
            held_out = list(load_rows(rows.path / "rows.jsonl"))
            reports, facts = evaluate(section, baseline, self.config.training, held_out, pool, drafter.path / "drafter", self._baseline)
            write_json(folder / "reports.json", [report.to_dict() for report in reports])
            track.summary({f"eval/{report.arm}/acceptance_length_k{report.k}": report.acceptance_length for report in reports} | facts)
            return facts | {"tokens": max(report.num_tokens for report in reports)}

        return self.workspace.ensure("evaluate", settings, inputs, make)

    def live(self, rows: Artifact, drafter: Artifact) -> Artifact:
        """All arms in one artifact: figures of different hours on one machine are not comparable."""
        section, sampling = self.config.evaluation, self._sampling("evaluation")
        settings = {key: getattr(section, key) for key in ("live_arms", "concurrencies", "live_urls")} | {
            "ks": section.live_ks or [section.k],
            "baseline": self._baseline_settings,
            "engine": self.workspace.engine_settings,
            "sampling": vars(sampling) | {"stop_ids": list(sampling.stop_ids)},
        }
        inputs = {"rows": rows.facts["rows_digest"], "drafter": drafter.signature, "target": self.workspace.target_signature} | self._baseline_inputs

        def make(folder: Path, track: StageTracker) -> dict[str, Any]:
            from eagle3.evaluation.arms import live_arms, measure_arms
            from eagle3.evaluation.live import write_live

            theirs = self._baseline
            if theirs is not None:
                theirs.load()  # refused here, with its reason, and not by a server
            arms = live_arms(section, self.config.baseline, drafter.path / "drafter", None if theirs is None else theirs.folder)
            held_out = list(load_rows(rows.path / "rows.jsonl"))
            self.workspace.release_model()
            served, timeout_s = self.workspace.served_name, self.config.generation.timeout_s
            reports = measure_arms(arms, self.workspace.live_server, served, held_out, sampling, section.concurrencies, timeout_s)
            write_live(folder, reports)
            track.summary({f"live/{report.arm}/k{report.k}/c{report.concurrency}/tokens_per_s": report.tokens_per_s for report in reports})
            return {"tokens": sum(report.num_tokens for report in reports), "machine": platform.node()}

        return self.workspace.ensure("live", settings, inputs, make)

    @functools.cached_property
    def _baseline(self) -> Baseline | None:
        """The baseline's drafter, if that is what ours is compared with."""
        if self.config.baseline.path is None:
            return None
        from eagle3.evaluation.baseline import Baseline

        return Baseline(self.config.baseline, self.workspace.target, self.workspace.aux_layers)

    @property
    def _baseline_settings(self) -> dict[str, Any]:
        return result_settings(self.config.baseline) | {"path": None}  # the content counts, not the place

    @property
    def _baseline_inputs(self) -> dict[str, str]:
        return {} if self._baseline is None else {"baseline": self._baseline.digest}

    def _check_inputs(self) -> None:
        """What can be known to fail before any work starts."""
        dataset, evaluation = self.config.dataset, self.config.evaluation
        for key, path in (("dataset.path", dataset.path if dataset.name == "file" else None), ("evaluation.path", evaluation.path)):
            if path and not Path(path).expanduser().is_file():
                raise DataError(f"{key}={path}: no such file.")
        target = self.workspace.target
        size = self.config.training.draft_vocab_size
        if size is not None and size > target.vocab_size:
            raise ConfigError(f"training.draft_vocab_size={size} exceeds the target's vocabulary of {target.vocab_size}: lower it.")
        outside = [token for token in self.config.training.pinned_tokens if not 0 <= token < target.vocab_size]
        if outside:
            raise ConfigError(f"training.pinned_tokens={outside} are not in the target's vocabulary of {target.vocab_size}: leave them out.")
        if self.config.generation.max_seq_len > target.max_context:
            raise ConfigError(f"generation.max_seq_len={self.config.generation.max_seq_len} exceeds the target's context of {target.max_context}: lower it.")
        log.debug("auxiliary layers %s", self.workspace.aux_layers)
        if self._baseline is not None and self.config.until == "evaluate":
            self._baseline.check()

    def _show_generation(self, made: Mapping[str, Artifact]) -> None:
        """How the answers came about, for each split: `generation.json` and a picture."""
        from eagle3.comparison.plots import plot_generation

        write_json(self.folder / "generation.json", {split: artifact.facts for split, artifact in made.items()})
        for split, artifact in made.items():
            plot_generation(artifact.facts, read_metrics(artifact.path), self.folder / f"generation_{split}.png")

    def _report(self, made: Mapping[str, Any]) -> float | None:
        """Write results.json and the picture, show the tables; after an early stop, say where the last artifact is."""
        if all(stage["status"] == "cached" for stage in self.workspace.stages):
            log.info("everything was in the store already, nothing had to be made")
        if self.config.until != "evaluate":
            last = made[self.config.until]
            for artifact in last.values() if isinstance(last, dict) else [last]:
                log.info("stopped after until=%s: %s", self.config.until, artifact.path)
            return None
        from eagle3.comparison.plots import plot_run
        from eagle3.comparison.table import live_table, results_table, stages_table
        from eagle3.evaluation.live import read_live
        from eagle3.evaluation.report import AcceptanceReport

        reports = [AcceptanceReport.from_dict(report) for report in json.loads((made["evaluate"].path / "reports.json").read_text())]
        live = read_live(made["live"].path) if "live" in made else []
        held_out = list(load_rows(made["generate"]["evaluation"].path / "rows.jsonl")) if live else []
        reports += [acceptance for report in live if (acceptance := report.acceptance(held_out)) is not None]
        if self.config.dataset.name == "magpie" and self.config.evaluation.path is None:
            reports = [dataclasses.replace(report, notes=(*report.notes, SYNTHETIC)) for report in reports]
        baseline = self.config.baseline
        results = collect_results(
            reports,
            "ours",
            self.config.evaluation.k,
            self.workspace.stages,
            str(made["train"].path / "drafter"),
            made["evaluate"].facts["vocabulary_coverage"],
            live,
            {"arm": baseline.name, "figures": dict(baseline.published), "source": baseline.published_source} if baseline.published else None,
        )
        write_results(self.folder, results, reports)
        plot_run(results, read_metrics(made["train"].path), self.folder / "results.png")
        console.print(stages_table(results))
        console.print(results_table(results))
        if live:
            console.print(live_table(results))
        log.info("results: %s", self.folder)
        return next(report.acceptance_length for report in reports if report.arm == "ours" and report.k == self.config.evaluation.k)
