"""All arms on the same held-out rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eagle3.config import BaselineConfig, EvaluationConfig, TrainingConfig
from eagle3.conversation import Row
from eagle3.drafter.model import load_drafter
from eagle3.drafter.vocabulary import VocabularyMap, coverage
from eagle3.evaluation.arms import OURS
from eagle3.evaluation.baseline import Baseline
from eagle3.evaluation.drafter import replay_drafter
from eagle3.evaluation.ngram import replay_ngram
from eagle3.evaluation.report import AcceptanceReport
from eagle3.hidden_states import StateReader
from eagle3.progress import progress
from eagle3.training.train import pick_device


def evaluate(
    config: EvaluationConfig,
    section: BaselineConfig,
    training: TrainingConfig,
    rows: Sequence[Row],
    states: Path,
    drafter: Path,
    baseline: Baseline | None,
) -> tuple[list[AcceptanceReport], dict[str, Any]]:
    """Replay our drafter, the baseline's if it is one, and prompt lookup on `rows` for every k up to `config.max_k`.

    Returns:
        The reports, and beside them the share of the answers' tokens that our draft vocabulary holds.
    """
    ks = range(1, config.max_k + 1)
    models: list[tuple[str, Any]] = [(OURS, load_drafter(drafter))]
    if baseline is not None:
        models.append((baseline.name, baseline.load()))
    reports: list[AcceptanceReport] = []
    for arm, model in models:
        model.to(pick_device(training.device))
        with progress(f"evaluate {arm}", len(rows), "rows") as update:
            reports += replay_drafter(model, rows, StateReader(states), training.dtype, ks, arm, config.temperature, lambda done: update(done, ""))
    if section.name != "none":
        reports += [replay_ngram(rows, k, config.temperature, section.max_n, section.min_n) for k in ks]
    ours = models[0][1]
    share = 1.0 if ours.d2t is None else coverage(VocabularyMap(ours.d2t.cpu(), ours.t2d.cpu()), rows)
    return reports, {"vocabulary_coverage": share}
