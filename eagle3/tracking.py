"""Metrics to the run folder, which is the truth, mirrored to W&B: the only module that imports wandb."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from eagle3.config import TrackingConfig
from eagle3.errors import ConfigError

METRICS_FILE = "metrics.jsonl"


class StageTracker:
    """Where one stage logs to."""

    def __init__(self, files: Sequence[Any], stage: str, mirror: Any) -> None:
        self._files, self._stage, self._mirror = files, stage, mirror

    def log(self, metrics: Mapping[str, float | int]) -> None:
        """One line of metrics; `step` orders them."""
        for file in self._files:
            file.write(json.dumps({"stage": self._stage, **metrics}) + "\n")
            file.flush()
        if self._mirror is not None:
            self._mirror.log(dict(metrics))

    def summary(self, values: Mapping[str, Any]) -> None:
        """Figures the stage is remembered by."""
        if self._mirror is not None:
            self._mirror.summary.update(dict(values))


class Tracker:
    """Metrics of one run: `metrics.jsonl` in its folder and in that of each artifact it made, and one W&B run per stage made."""

    def __init__(self, config: TrackingConfig, run_folder: Path, run_config: Mapping[str, Any]) -> None:
        self._config, self._folder, self._run_config = config, run_folder, run_config

    @contextlib.contextmanager
    def stage(self, stage: str, signature: str, artifact_folder: Path) -> Iterator[StageTracker]:
        """Track one stage. Its W&B run is named by the signature, so a stage that is resumed goes on in the same run."""
        with contextlib.ExitStack() as stack:
            files = [stack.enter_context((folder / METRICS_FILE).open("a", encoding="utf-8")) for folder in (self._folder, artifact_folder)]
            yield StageTracker(files, stage, stack.enter_context(self._mirror(stage, signature)))

    @contextlib.contextmanager
    def _mirror(self, stage: str, signature: str) -> Iterator[Any]:
        if self._config.mode == "disabled":
            yield None
            return
        os.environ.setdefault("WANDB_SILENT", "true")
        import wandb

        try:
            run = wandb.init(
                mode=self._config.mode,  # type: ignore[arg-type]  # checked by TrackingConfig
                project=self._config.project,
                entity=self._config.entity,
                group=self._config.group or self._folder.name,
                job_type=stage,
                id=f"{stage}-{signature}",
                name=f"{stage}-{signature[:6]}",
                resume="allow" if self._config.mode == "online" else None,
                tags=list(self._config.tags),
                dir=str(self._folder),
                config=dict(self._run_config),
                settings=wandb.Settings(console="off", disable_git=True, disable_code=True, x_disable_stats=True),
            )
        except (wandb.errors.Error, OSError) as error:
            reason = (str(error).splitlines() or ["no reason given"])[0]
            raise ConfigError(f"W&B can't be reached ({reason}): run `wandb login`, or use tracking=offline or tracking=disabled.") from None
        with run:
            yield run


def read_metrics(artifact_folder: Path) -> list[dict[str, Any]]:
    """The metrics a finished stage logged, in the order of their steps; what a resumed stage logged again counts once, as last logged."""
    lines = (artifact_folder / METRICS_FILE).read_text(encoding="utf-8").splitlines()
    latest = {(record.get("step", 0), "epoch" in record): record for record in map(json.loads, lines)}
    return [latest[key] for key in sorted(latest)]
