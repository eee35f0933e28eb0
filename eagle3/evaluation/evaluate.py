"""All arms on the same held-out rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eagle3.config import BaselineConfig, EvaluationConfig, TrainingConfig
from eagle3.conversation import Row
from eagle3.drafter.model import load_drafter
from eagle3.drafter.vocabulary import VocabularyMap, coverage
from eagle3.evaluation.drafter import replay_drafter
from eagle3.evaluation.ngram import replay_ngram
from eagle3.evaluation.report import AcceptanceReport
from eagle3.hidden_states import StateReader
from eagle3.progress import progress
from eagle3.training.train import pick_device

OURS = "ours"


def evaluate(
    config: EvaluationConfig, baseline: BaselineConfig, training: TrainingConfig, rows: Sequence[Row], states: Path, drafter: Path
) -> tuple[list[AcceptanceReport], dict[str, Any]]:
    """Replay our drafter and the baseline on `rows` for every k up to `config.max_k`.

    Returns:
        The reports, and beside them the share of the answers' tokens that the draft vocabulary holds.
    """
    ks = range(1, config.max_k + 1)
    model: Any = load_drafter(drafter)
    model.to(pick_device(training.device))
    with progress("evaluate", len(rows), "rows") as update:
        reports = replay_drafter(model, rows, StateReader(states), training.dtype, ks, OURS, config.temperature, lambda done: update(done, ""))
    if baseline.name == "ngram":
        reports += [replay_ngram(rows, k, config.temperature, baseline.max_n, baseline.min_n) for k in ks]
    share = 1.0 if model.d2t is None else coverage(VocabularyMap(model.d2t.cpu(), model.t2d.cpu()), rows)
    return reports, {"vocabulary_coverage": share}
