"""The training loop: optimiser steps on the TTT loss, validated by replayed acceptance length, resumable at any step.

Nothing here draws random numbers but the order of rows, and that depends on the seed and the epoch alone: weights, optimiser state and `Progress` are all that
a resumed run needs to do, bit for bit, what the killed one would have done.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from eagle3.conversation import Row
from eagle3.drafter.model import load_drafter, save_drafter
from eagle3.drafter.ttt import ttt_loss
from eagle3.errors import TrainingError
from eagle3.evaluation.drafter import replay_drafter
from eagle3.hidden_states import StateReader
from eagle3.training import BEST_FILE, CHECKPOINT_FILE
from eagle3.training.batches import CompactRow, count, epoch_steps, load_batch, micro_batches
from eagle3.training.optimizer import lr_scale, make_optimizers
from eagle3.training.ranks import Ranks, on_sigterm
from eagle3.training.settings import TrainingConfig

log = logging.getLogger(__name__)


@dataclass
class Progress:
    """Where training stands."""

    epoch: int = 0
    step_in_epoch: int = 0
    step: int = 0
    is_done: bool = False
    best_acceptance_length: float = 0.0
    best_epoch: int = 0
    num_stale: int = 0
    seconds: float = 0.0
    num_supervised: int = 0
    history: list[dict[str, float]] = field(default_factory=list)


class Trainer:
    """Trains one drafter in `folder`, going on from the checkpoint in it if there is one.

    Raises:
        TrainingError: there is nothing to train on, the checkpoint is damaged, SIGTERM came (a checkpoint is then written), or a loss or a gradient is not a
            number; the rows of the step are named.
    """

    def __init__(
        self, config: TrainingConfig, model: Any, train: Sequence[CompactRow], validation: Sequence[Row], reader: StateReader, folder: Path, ranks: Ranks
    ) -> None:
        if not train or not validation:
            raise TrainingError(f"{len(train)} rows to train on and {len(validation)} to validate with: raise generation.num_samples.")
        self.config, self.model, self.train_rows, self.validation_rows = config, model, train, validation
        self.reader, self.folder, self.ranks = reader, folder, ranks
        self.device = next(model.parameters()).device
        self.dtype = getattr(torch, config.dtype)
        model.lm_head.weight.requires_grad_(config.train_head)
        model.embed_tokens.weight.requires_grad_(config.train_embeddings)
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.optimizers = make_optimizers(model, config)
        self.progress = Progress()
        num_steps = sum(len(epoch_steps(train, config.batch_tokens, config.seed, epoch)) for epoch in range(config.num_epochs))
        self.num_steps = min(num_steps, config.max_steps or num_steps)
        self._load_checkpoint()

    def run(self, log: Callable[[dict[str, float]], None], advance: Callable[[int], None]) -> dict[str, Any]:
        """Train to the end, leave the best drafter in `folder/drafter`, and say what came out.

        Args:
            log: receives the metrics of each step and each validation.
            advance: receives the number of steps done so far, resumed ones included.
        """
        advance(round(self._share_done() * self.num_steps))
        if self.config.init is not None and not self.progress.history:
            log(self._validate())  # what fine-tuning starts from, and has to beat
        last_checkpoint = self._clock = time.monotonic()
        stop = threading.Event()
        with on_sigterm(stop.set):
            while not self.progress.is_done:
                steps = epoch_steps(self.train_rows, self.config.batch_tokens, self.config.seed, self.progress.epoch)
                while self.progress.step_in_epoch < len(steps) and self._share_done() < 1:
                    metrics, stopping = self._step(steps[self.progress.step_in_epoch], stop.is_set())
                    log(metrics)
                    advance(round(self._share_done() * self.num_steps))
                    if stopping or time.monotonic() - last_checkpoint > self.config.checkpoint_minutes * 60:
                        self._save_checkpoint()
                        last_checkpoint = time.monotonic()
                    if stopping:
                        self.ranks.from_first(0.0, self.device)  # the others wait until the checkpoint is written
                        raise TrainingError(f"training was stopped after step {self.progress.step} of {self.num_steps}; the same command goes on from there.")
                if metrics := self._finish_epoch():
                    log(metrics)
                last_checkpoint = self._clock = time.monotonic()
        return self._finish() if self.ranks.is_first else {}

    def note(self) -> str:
        """How it goes, in a few words, for the progress bar."""
        best = self.progress.best_acceptance_length
        return f"validation acceptance length {best:.2f}" if best else ""

    def _share_done(self) -> float:
        """How much of the training is behind us: of its steps or of its time, whichever is nearer its end."""
        of_steps = self.progress.step / self.num_steps
        return of_steps if self.config.max_minutes is None else max(of_steps, self.progress.seconds / (60 * self.config.max_minutes))

    def _step(self, rows: Sequence[CompactRow], stop: bool) -> tuple[dict[str, float], bool]:
        """One optimiser step; its loss is normalised over all its rows, however they are cut into micro-batches and processes.

        Returns:
            Its metrics, and whether any process was asked to stop.
        """
        began, num_steps = time.monotonic(), self.config.ttt_steps
        lr = self.config.lr * lr_scale(self._share_done(), 1 / self.num_steps, self.config)
        num_supervised, denominator = count(rows, "supervised"), count(rows, self.config.normalizer)
        losses, matches = torch.zeros(num_steps, device=self.device), torch.zeros(num_steps, device=self.device)
        for group in micro_batches(self.ranks.share(rows), self.config.micro_batch_tokens):
            batch = load_batch(group, self.reader, self.device, self.dtype)
            with self._autocast():
                result = ttt_loss(self.model, batch, num_steps=num_steps, step_decay=self.config.ttt_decay, loss=self.config.loss, denominator=denominator)
            result.loss.backward()
            losses += torch.stack(result.step_losses).float() * torch.tensor(result.step_counts, device=self.device) / num_supervised
            matches += torch.stack(result.step_matches)
        stopping = self._add_up([losses, matches], stop)
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, self.config.max_grad_norm))
        if not math.isfinite(norm) or not torch.isfinite(losses).all():
            names = ", ".join(row.id for row in rows)
            raise TrainingError(f"step {self.progress.step}: the loss or its gradient is not a number; lower training.lr, or look at these rows: {names}.")
        for optimizer in self.optimizers:
            for group_of_parameters in optimizer.param_groups:
                group_of_parameters["lr"] = lr
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.progress.step += 1
        self.progress.step_in_epoch += 1
        self.progress.num_supervised += num_supervised
        metrics = {"step": self.progress.step, "train/loss": float(losses.mean()), "train/lr": lr, "train/grad_norm": norm}
        metrics |= {f"train/match_{step}": share for step, share in enumerate((matches / num_supervised).tolist())}
        tokens = count(rows, "positions")
        metrics |= {"train/tokens_per_s": tokens / (time.monotonic() - began), "train/supervised_share": num_supervised / tokens}
        return metrics, stopping

    def _add_up(self, sums: list[torch.Tensor], stop: bool) -> bool:
        """Sum gradients and `sums` over the processes, and agree on the time that is used up and on whether to stop."""
        now = time.monotonic()
        seconds, self._clock = self.progress.seconds + now - self._clock, now
        signals = torch.tensor([seconds if self.ranks.is_first else 0.0, float(stop)], dtype=torch.float64, device=self.device)
        for parameter in self.parameters:
            if parameter.grad is None:  # more processes than rows
                parameter.grad = torch.zeros_like(parameter)
        self.ranks.add_up([*(parameter.grad for parameter in self.parameters if parameter.grad is not None), *sums, signals])
        self.progress.seconds = float(signals[0])
        return bool(signals[1])

    def _finish_epoch(self) -> dict[str, float]:
        """Validate if it is time to, and leave a checkpoint; returns the metrics, if any."""
        progress, config = self.progress, self.config
        progress.is_done = self._share_done() >= 1 or progress.epoch + 1 >= config.num_epochs
        progress.epoch += 1
        progress.step_in_epoch = 0
        metrics = self._validate() if progress.is_done or progress.epoch % config.validate_every == 0 else {}
        if config.patience is not None and progress.num_stale >= config.patience:
            progress.is_done = True
        self._save_checkpoint()
        return metrics

    def _validate(self) -> dict[str, float]:
        """Measure the drafter as it is now, and keep its weights if they are the best so far."""
        progress = self.progress
        length = self.ranks.from_first(self._acceptance_length(self.model) if self.ranks.is_first else 0.0, self.device)
        progress.num_stale += 1
        if length > progress.best_acceptance_length:
            progress.best_acceptance_length, progress.best_epoch, progress.num_stale = length, progress.epoch, 0
            self._save({"weights": self._trained_weights()}, BEST_FILE)
        metrics = {"step": progress.step, "epoch": progress.epoch, "val/acceptance_length": length}
        progress.history.append(metrics)
        return metrics

    def _finish(self) -> dict[str, Any]:
        """Save the best drafter, then prove that what was saved is what was measured: reload it and replay it again."""
        self.model.load_state_dict(self._load(BEST_FILE)["weights"], strict=False)
        save_drafter(self.model, self.folder / "drafter")
        reloaded = self._acceptance_length(load_drafter(self.folder / "drafter").to(self.device))
        best = self.progress.best_acceptance_length
        if abs(reloaded - best) > 1e-3 * best:
            raise TrainingError(
                f"the saved drafter replays at {reloaded:.4f}, the trained one at {best:.4f}: {self.folder / 'drafter'} is not what was trained."
            )
        return {
            "validation_acceptance_length": best,
            "best_epoch": self.progress.best_epoch,
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
        states = [optimizer.state_dict() for optimizer in self.optimizers]
        self._save({"weights": self._trained_weights(), "optimizers": states, "progress": vars(self.progress)}, CHECKPOINT_FILE)

    def _load_checkpoint(self) -> None:
        if not (self.folder / CHECKPOINT_FILE).exists():
            return
        state = self._load(CHECKPOINT_FILE)
        self.model.load_state_dict(state["weights"], strict=False)
        for optimizer, optimizer_state in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(optimizer_state)
        self.progress = Progress(**state["progress"])

    def _save(self, state: dict[str, Any], name: str) -> None:
        """Write a file that is the old or the whole new one, also after a crash; the first process's, for all."""
        if not self.ranks.is_first:
            return
        temporary = self.folder / f".{name}"
        with temporary.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self.folder / name)

    def _load(self, name: str) -> dict[str, Any]:
        try:
            state: dict[str, Any] = torch.load(self.folder / name, weights_only=True, map_location=self.device)
        except Exception as error:  # torch raises whatever its zip reader and unpickler do
            raise TrainingError(f"{self.folder / name} is damaged ({str(error).splitlines()[0]}): delete it and {CHECKPOINT_FILE}, and run again.") from None
        return state
