"""The section `training` of the configuration: the drafter's shape, its loss, its optimiser, how long it trains, and on what."""

from __future__ import annotations

import json
from dataclasses import dataclass

from eagle3.errors import ConfigError
from eagle3.knobs import at_least, knob, one_of, require

OR_INIT = "or what the checkpoint of training.init has"
# speculators' names; a test compares them.
LOSSES = ("ce", "jsd", "kl_div", "lk_hybrid", "nla", "rkl", "tv")


@dataclass(frozen=True)
class TrainingConfig:
    """The drafter and how it is trained."""

    # The drafter
    init: str | None = knob(
        None,
        "Go on from a drafter: a folder or hub name, in speculators' or EAGLE/SpecForge form; its vocabulary, shape and rope stay. Null: from scratch.",
    )
    draft_vocab_size: int | None = knob(
        None, f"Tokens the drafter can propose: the most frequent ones of the training answers. Null: 8192 (all, if the target has fewer), {OR_INIT}."
    )
    pinned_tokens: list[int] = knob([], "Ids that the draft vocabulary holds however rare they are; those that end an answer always are in it.")
    architecture: str | None = knob(None, f"Decoder layers of the drafter: llama or qwen3 (norms queries and keys). Null: llama, {OR_INIT}.")
    num_layers: int | None = knob(None, f"Transformer layers of the drafter. Null: 1, {OR_INIT}.")
    intermediate_size: int | None = knob(None, f"Width of the drafter's MLP. Null: the target's (three times the hidden size if it is all experts), {OR_INIT}.")
    norm_before_residual: bool | None = knob(None, f"Take the residual of the first layer behind its norm; SGLang serves only false. Null: true, {OR_INIT}.")
    fc_norm: bool | None = knob(None, f"Norm each auxiliary state before they are joined. Null: false, {OR_INIT}.")
    norm_output: bool | None = knob(None, f"Feed the normed state, not the raw one, to the next TTT step (EAGLE 3.1). Null: false, {OR_INIT}.")
    train_head: bool = knob(False, "Train the head too; else it stays the target's (or the checkpoint's).")
    train_embeddings: bool = knob(False, "Train the embeddings too; a server then keeps the drafter's own beside the target's.")
    # The loss
    ttt_steps: int = knob(3, "Training-time test: how many self-fed steps the drafter is trained for.")
    ttt_decay: float = knob(1.0, "Weight of TTT step s is ttt_decay ** s.")
    loss: str = knob("kl_div", 'A loss of speculators (kl_div, ce, tv, nla, lk_hybrid, ...) or a JSON object of weights, like {"ce": 0.1, "tv": 0.9}.')
    normalizer: str = knob("supervised", "What the loss of an optimiser step is divided by: its supervised tokens, all its positions, or its rows.")
    # The optimiser
    batch_tokens: int = knob(512, "Supervised tokens in one optimiser step, over all processes.")
    optimizer: str = knob("adamw", "adamw, or muon: Muon for matrices, its update scaled to AdamW's so that lr means the same, and AdamW for the rest.")
    lr: float = knob(1e-3, "Peak learning rate.")
    betas: list[float] = knob([0.9, 0.95], "AdamW's decay rates of the first and second moment.")
    weight_decay: float = knob(0.0, "Decoupled weight decay.")
    max_grad_norm: float = knob(0.5, "Gradients are clipped to this norm.")
    schedule: str = knob("cosine", "How the learning rate falls after the warm-up: cosine, linear, or constant (not at all).")
    warmup_ratio: float = knob(0.05, "Share of the training in which the learning rate rises.")
    min_lr_ratio: float = knob(0.0, "The learning rate falls to this share of its peak.")
    # How long
    num_epochs: int = knob(6, "Passes over the training rows; training stops at the first of num_epochs, max_steps and max_minutes.")
    max_steps: int | None = knob(None, "Optimiser steps at most.")
    max_minutes: float | None = knob(
        None,
        "Minutes of optimiser steps at most, validation not counted. The schedule then follows the larger of the shares of steps and of time that are used up, "
        "so the learning rate has fallen when the time is up, whatever the speed.",
    )
    patience: int | None = knob(None, "Stop after this many validations in a row without a better acceptance length; the schedule does not foresee it.")
    validate_every: int = knob(1, "Epochs between validations; the end of training is always validated.")
    validation_fraction: float = knob(0.05, "Share of training conversations held out to choose the best checkpoint by replayed acceptance length.")
    seed: int = knob(0, "Seed of the drafter's weights and of the order of rows.")
    # On what
    dtype: str = knob("bfloat16", "Autocast format of the forward pass; weights and optimiser state stay float32.")
    device: str = knob("auto", "auto, cpu or cuda.", affects_result=False)
    num_gpus: int = knob(1, "Processes that train, one a GPU (on a CPU: processes that share its cores); they share each optimiser step.", affects_result=False)
    micro_batch_tokens: int = knob(
        8192, "Padded tokens that go through the drafter at once; an optimiser step accumulates as many such passes as it needs.", affects_result=False
    )
    checkpoint_minutes: float = knob(
        5.0, "Minutes between checkpoints that a killed run resumes from; one is also written after each epoch and on SIGTERM.", affects_result=False
    )

    def __post_init__(self) -> None:
        low = {"draft_vocab_size": 1, "num_layers": 1, "intermediate_size": 1, "ttt_steps": 1, "batch_tokens": 1, "weight_decay": 0.0, "num_epochs": 1}
        low |= {"max_steps": 1, "patience": 1, "validate_every": 1, "num_gpus": 1, "micro_batch_tokens": 1, "checkpoint_minutes": 0.0}
        at_least(self, "training", low)
        for key in ("lr", "ttt_decay", "max_grad_norm", "max_minutes"):
            value = getattr(self, key)
            require(value is None or value > 0, f"training.{key}", value, "it must be greater than 0")
        require(0 <= self.warmup_ratio < 1, "training.warmup_ratio", self.warmup_ratio, "it must lie in [0, 1)")
        require(0 <= self.min_lr_ratio <= 1, "training.min_lr_ratio", self.min_lr_ratio, "it must lie in [0, 1]")
        require(0 < self.validation_fraction < 1, "training.validation_fraction", self.validation_fraction, "it must lie in (0, 1)")
        require(len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas), "training.betas", self.betas, "give two numbers in [0, 1)")
        if self.architecture is not None:
            one_of("training.architecture", self.architecture, ("llama", "qwen3"))
        _check_loss(self.loss)
        one_of("training.normalizer", self.normalizer, ("supervised", "positions", "rows"))
        one_of("training.optimizer", self.optimizer, ("adamw", "muon"))
        one_of("training.schedule", self.schedule, ("cosine", "linear", "constant"))
        one_of("training.dtype", self.dtype, ("bfloat16", "float32"))
        one_of("training.device", self.device, ("auto", "cpu", "cuda"))
        self._check_combinations()

    def _check_combinations(self) -> None:
        if self.pinned_tokens and self.init is not None:
            raise ConfigError("training.pinned_tokens can't be set with training.init: the checkpoint's draft vocabulary is kept; leave pinned_tokens empty.")
        if self.schedule == "constant" and self.min_lr_ratio:
            raise ConfigError(f"training.min_lr_ratio={self.min_lr_ratio} means nothing with training.schedule=constant: leave it 0, or take another schedule.")


def _check_loss(spec: str) -> None:
    try:
        weights = {spec: 1.0} if spec in LOSSES else json.loads(spec)
    except ValueError:
        weights = None
    known = isinstance(weights, dict) and set(weights) <= set(LOSSES) and all(isinstance(weight, int | float) for weight in weights.values())
    rule = f"give one of {', '.join(LOSSES)}, or a JSON object of their weights"
    require(bool(known and weights), "training.loss", spec, rule)
