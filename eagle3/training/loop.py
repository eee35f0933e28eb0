"""The training loop: AdamW on the TTT loss, validated by replayed acceptance length, resumable at any step."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from eagle3.config import TrainingConfig
from eagle3.conversation import Row
from eagle3.drafter.model import load_drafter, save_drafter
from eagle3.drafter.ttt import ttt_loss
from eagle3.errors import TrainingError
from eagle3.evaluation.drafter import replay_drafter
from eagle3.hidden_states import StateReader
from eagle3.training import BEST_FILE, CHECKPOINT_FILE
from eagle3.training.batches import CompactRow, epoch_steps, load_batch, micro_batches

log = logging.getLogger(__name__)


@dataclass
class Progress:
    """Where training stands: with the weights and the optimiser's state, all that a resumed run needs."""

    epoch: int = 0
    step_in_epoch: int = 0
    step: int = 0
    best_acceptance_length: float = 0.0
    best_epoch: int = -1
    seconds: float = 0.0
    num_supervised: int = 0
    history: list[dict[str, float]] = field(default_factory=list)


class Trainer:
    """Trains one drafter in `folder`, going on from the checkpoint in it if there is one.

    Raises:
        TrainingError: there is nothing to train on, or a loss or a gradient is not a number; the rows of the step are named.
    """

    def __init__(self, config: TrainingConfig, model: Any, train: Sequence[CompactRow], validation: Sequence[Row], reader: StateReader, folder: Path) -> None:
        if not train or not validation:
            raise TrainingError(f"{len(train)} rows to train on and {len(validation)} to validate with: raise generation.num_samples.")
        self.config, self.model, self.train_rows, self.validation_rows = config, model, train, validation
        self.reader, self.folder = reader, folder
        self.device = next(model.parameters()).device
        self.dtype = getattr(torch, config.dtype)
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        fused = self.device.type in ("cpu", "cuda")
        self.optimizer = torch.optim.AdamW(self.parameters, lr=config.lr, betas=(0.9, 0.95), weight_decay=config.weight_decay, fused=fused)
        self.progress = Progress()
        self.num_steps = sum(len(epoch_steps(train, config.batch_tokens, config.seed, epoch)) for epoch in range(config.num_epochs))
        self._load_checkpoint()

    def run(self, log: Callable[[dict[str, float]], None], advance: Callable[[int], None]) -> dict[str, Any]:
        """Train to the end, leave the best drafter in `folder/drafter`, and say what came out.

        Args:
            log: receives the metrics of each step and each epoch.
            advance: receives the number of steps done so far, resumed ones included.
        """
        advance(self.progress.step)
        last_checkpoint = started = time.monotonic()
        for epoch in range(self.progress.epoch, self.config.num_epochs):
            steps = epoch_steps(self.train_rows, self.config.batch_tokens, self.config.seed, epoch)
            while self.progress.step_in_epoch < len(steps):
                log(self._step(steps[self.progress.step_in_epoch]))
                advance(self.progress.step)
                now = time.monotonic()
                self.progress.seconds, started = self.progress.seconds + now - started, now
                if now - last_checkpoint > self.config.checkpoint_minutes * 60:
                    self._save_checkpoint()
                    last_checkpoint = now
            log(self._finish_epoch())
            last_checkpoint = time.monotonic()
        return self._finish()

    def note(self) -> str:
        """How it goes, in a few words, for the progress bar."""
        best = self.progress.best_acceptance_length
        return f"validation acceptance length {best:.2f}" if best else ""

    def _step(self, rows: Sequence[CompactRow]) -> dict[str, float]:
        """One optimiser step. The loss is the mean over all supervised tokens of the step, however it is cut into micro-batches."""
        began = time.monotonic()
        lr = self.config.lr * lr_scale(self.progress.step, self.num_steps, self.config.warmup_ratio)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        num_supervised = sum(row.num_supervised for row in rows)
        losses, matches = torch.zeros(self.config.ttt_steps), torch.zeros(self.config.ttt_steps)
        for group_rows in micro_batches(rows):
            batch = load_batch(group_rows, self.reader, self.device, self.dtype)
            with self._autocast():
                result = ttt_loss(
                    self.model, batch, num_steps=self.config.ttt_steps, step_decay=self.config.ttt_decay, loss=self.config.loss, denominator=num_supervised
                )
            result.loss.backward()
            losses += torch.stack(result.step_losses).float().cpu() * torch.tensor(result.step_counts) / num_supervised
            matches += torch.stack(result.step_matches).cpu()
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, self.config.max_grad_norm))
        if not math.isfinite(norm) or not torch.isfinite(losses).all():
            names = ", ".join(row.id for row in rows)
            raise TrainingError(f"step {self.progress.step}: the loss or its gradient is not a number; lower training.lr, or look at these rows: {names}.")
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.progress.step += 1
        self.progress.step_in_epoch += 1
        self.progress.num_supervised += num_supervised
        metrics = {"step": self.progress.step, "train/loss": float(losses.mean()), "train/lr": lr, "train/grad_norm": norm}
        metrics |= {f"train/match_{step}": float(matches[step]) / num_supervised for step in range(self.config.ttt_steps)}
        tokens = sum(len(row.input_ids) for row in rows)
        return metrics | {"train/tokens_per_s": tokens / (time.monotonic() - began), "train/supervised_share": num_supervised / tokens}

    def _finish_epoch(self) -> dict[str, float]:
        """Validate, keep the weights if they are the best so far, and leave a checkpoint."""
        length = self._acceptance_length(self.model)
        if length > self.progress.best_acceptance_length:
            self.progress.best_acceptance_length, self.progress.best_epoch = length, self.progress.epoch
            save_atomically(self._trained_weights(), self.folder / BEST_FILE)
        self.progress.epoch += 1
        self.progress.step_in_epoch = 0
        metrics = {"step": self.progress.step, "epoch": self.progress.epoch, "val/acceptance_length": length}
        self.progress.history.append(metrics)
        self._save_checkpoint()
        return metrics

    def _finish(self) -> dict[str, Any]:
        """Save the best drafter, then prove that what was saved is what was measured: reload it and replay it again."""
        self.model.load_state_dict(torch.load(self.folder / BEST_FILE, weights_only=True), strict=False)
        save_drafter(self.model, self.folder / "drafter")
        reloaded = self._acceptance_length(load_drafter(self.folder / "drafter").to(self.device))
        best = self.progress.best_acceptance_length
        if abs(reloaded - best) > 1e-3 * best:
            raise TrainingError(
                f"the saved drafter replays at {reloaded:.4f}, the trained one at {best:.4f}: {self.folder / 'drafter'} is not what was trained."
            )
        return {
            "validation_acceptance_length": best,
            "best_epoch": self.progress.best_epoch + 1,
            "steps": self.progress.step,
            "train_rows": len(self.train_rows),
            "validation_rows": len(self.validation_rows),
            "tokens": self.progress.num_supervised,
            "train_seconds": self.progress.seconds,
            "history": self.progress.history,
        }

    def _acceptance_length(self, model: Any) -> float:
        return replay_drafter(model, self.validation_rows, self.reader, self.config.dtype, (self.config.ttt_steps,), "validation", 0.0)[0].acceptance_length

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast(self.device.type, dtype=self.dtype, enabled=self.dtype != torch.float32)

    def _trained_weights(self) -> dict[str, torch.Tensor]:
        return {name: parameter.detach() for name, parameter in self.model.named_parameters() if parameter.requires_grad}

    def _save_checkpoint(self) -> None:
        state = {"weights": self._trained_weights(), "optimizer": self.optimizer.state_dict(), "progress": vars(self.progress)}
        save_atomically(state, self.folder / CHECKPOINT_FILE)

    def _load_checkpoint(self) -> None:
        path = self.folder / CHECKPOINT_FILE
        if path.exists():
            state = torch.load(path, weights_only=True, map_location=self.device)
            self.model.load_state_dict(state["weights"], strict=False)
            self.optimizer.load_state_dict(state["optimizer"])
            self.progress = Progress(**state["progress"])


def lr_scale(step: int, num_steps: int, warmup_ratio: float) -> float:
    """Linear warm-up, then a half cosine down to 0 behind the last step."""
    warmup = max(round(num_steps * warmup_ratio), 1)
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(num_steps - warmup, 1)))


def save_atomically(state: Any, path: Path) -> None:
    temporary = path.with_name(f".{path.name}")
    torch.save(state, temporary)
    temporary.replace(path)
