"""From rows and states to a saved drafter."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from eagle3.config import TrainingConfig
from eagle3.conversation import Row
from eagle3.drafter.model import new_drafter
from eagle3.drafter.vocabulary import build_vocabulary_map, count_tokens, coverage
from eagle3.hidden_states import StateReader
from eagle3.progress import progress
from eagle3.targets import TargetInfo
from eagle3.tracking import StageTracker
from eagle3.training.batches import compact, split_validation
from eagle3.training.loop import Trainer, log


def train(config: TrainingConfig, target: TargetInfo, rows: Iterable[Row], states: Path, folder: Path, track: StageTracker) -> dict[str, Any]:
    """Train a drafter for `target` in `folder`, going on where a killed run stopped; `folder/drafter` is what vLLM serves.

    Raises:
        TrainingError, CaptureError, DrafterError: nothing to train on, states that are not the rows', shapes that can't be.
    """
    rows = list(rows)
    reader = StateReader(states)
    held_out = split_validation((row.prompt_id for row in rows), config.validation_fraction)
    training = [row for row in rows if row.prompt_id not in held_out]
    validation = [row for row in rows if row.prompt_id in held_out]
    compacted = [compact(row) for row in training]
    kept = [row for row in compacted if row.num_supervised]
    if len(kept) < len(compacted):
        log.warning("train: %d rows are left out, none of their tokens can be supervised", len(compacted) - len(kept))
    vocabulary = build_vocabulary_map(count_tokens(training), config.draft_vocab_size, target.vocab_size, pinned=target.eos_ids)
    model: torch.nn.Module = new_drafter(
        str(target.path),
        reader.layers[:-1],
        vocabulary,
        num_layers=config.num_layers,
        ttt_steps=config.ttt_steps,
        norm_before_residual=config.norm_before_residual,
        fc_norm=config.fc_norm,
        norm_output=config.norm_output,
        seed=config.seed,
    )
    trainer = Trainer(config, model.to(pick_device(config.device)), kept, validation, reader, folder)
    with progress("train", trainer.num_steps, "steps") as update:
        facts = trainer.run(track.log, lambda step: update(step, trainer.note()))
    num_bytes = sum(file.stat().st_size for file in (folder / "drafter").iterdir())
    return facts | {"bytes": num_bytes, "validation_coverage": coverage(vocabulary, validation), "left_out_rows": len(compacted) - len(kept)}


def pick_device(name: str) -> torch.device:
    """`auto` is the GPU if there is one."""
    return torch.device("cuda" if name == "auto" and torch.cuda.is_available() else "cpu" if name == "auto" else name)
