"""From rows and states to a saved drafter: in this process, or in several that share each optimiser step."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eagle3.drafter.model import new_drafter
from eagle3.drafter.pretrained import load_initial
from eagle3.drafter.vocabulary import VocabularyMap, build_vocabulary_map, count_tokens, coverage
from eagle3.errors import TrainingError
from eagle3.generation import load_rows
from eagle3.hidden_states import StateReader
from eagle3.progress import progress
from eagle3.targets import TargetInfo
from eagle3.tracking import StageTracker
from eagle3.training.batches import compact, split_validation
from eagle3.training.loop import Trainer, log
from eagle3.training.ranks import Ranks
from eagle3.training.settings import TrainingConfig

DRAFT_VOCAB_SIZE = 8192


@dataclass(frozen=True)
class Job:
    """All that a process needs to train: settings, the target, and where rows and states are and the drafter goes."""

    config: TrainingConfig
    target: TargetInfo
    rows: Path
    states: Path
    folder: Path


def train(config: TrainingConfig, target: TargetInfo, rows: Path, states: Path, folder: Path, track: StageTracker) -> dict[str, Any]:
    """Train a drafter for `target` in `folder`, going on where a killed run stopped; `folder/drafter` is what vLLM serves.

    Raises:
        TrainingError, CaptureError, DrafterError: nothing to train on, states that are not the rows', shapes that can't be.
    """
    job = Job(config, target, rows, states, folder)
    if config.num_gpus > 1:
        from eagle3.training.launch import launch

        facts = launch(job, track)
    else:
        trainer, facts = prepare(job, Ranks(), pick_device(config.device))
        with progress("train", trainer.num_steps, "steps") as update:
            facts |= trainer.run(track.log, lambda done: update(done, trainer.note()))
    num_bytes = sum(file.stat().st_size for file in (folder / "drafter").iterdir())
    return facts | {"bytes": num_bytes}


def prepare(job: Job, ranks: Ranks, device: torch.device) -> tuple[Trainer, dict[str, Any]]:
    """One process's trainer, and what is known of its data before it runs."""
    config, reader = job.config, StateReader(job.states)
    held_out = split_validation((row.prompt_id for row in load_rows(job.rows)), config.validation_fraction)
    validation = [row for row in load_rows(job.rows) if row.prompt_id in held_out]
    compacted = [compact(row) for row in load_rows(job.rows) if row.prompt_id not in held_out]
    kept = [row for row in compacted if row.num_supervised]
    if len(kept) < len(compacted) and ranks.is_first:
        log.warning("train: %d rows are left out, none of their tokens can be supervised", len(compacted) - len(kept))
    model: Any = first_drafter(job, reader.layers[:-1], held_out).to(device)
    share = 1.0 if model.d2t is None else coverage(VocabularyMap(model.d2t.cpu(), model.t2d.cpu()), validation)
    trainer = Trainer(config, model, kept, validation, reader, job.folder, ranks)
    return trainer, {"validation_coverage": share, "left_out_rows": len(compacted) - len(kept)}


def first_drafter(job: Job, aux_layers: list[int], held_out: set[str]) -> Any:
    """The drafter that training starts from: the checkpoint of `training.init`, or a new one with the training answers' most frequent tokens."""
    config, target = job.config, job.target
    keys = ("architecture", "num_layers", "intermediate_size", "norm_before_residual", "fc_norm", "norm_output")
    shape: dict[str, Any] = {key: getattr(config, key) for key in keys if getattr(config, key) is not None}
    if config.init is not None:
        size = {} if config.draft_vocab_size is None else {"draft_vocab_size": config.draft_vocab_size}
        return load_initial(config.init, target, aux_layers, shape | size)
    counts = count_tokens(row for row in load_rows(job.rows) if row.prompt_id not in held_out)
    num_tokens = config.draft_vocab_size or min(DRAFT_VOCAB_SIZE, target.vocab_size)
    vocabulary = build_vocabulary_map(counts, num_tokens, target.vocab_size, pinned=[*target.eos_ids, *config.pinned_tokens])
    return new_drafter(str(target.path), aux_layers, vocabulary, ttt_steps=config.ttt_steps, seed=config.seed, **shape)


def pick_device(name: str) -> torch.device:
    """The device of `training.device`; `auto` is the GPU if there is one.

    Raises:
        TrainingError: there is no GPU.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise TrainingError("training.device=cuda, but torch sees no GPU: set training.device=cpu or auto.")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")
