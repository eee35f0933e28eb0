"""What changes the weights: AdamW or Muon, and the learning rate over the course of training."""

from __future__ import annotations

import math
from typing import Any

import torch

from eagle3.training.settings import TrainingConfig

# Large tables whose rows are tokens, not directions of a matrix that Muon could make orthogonal.
_TABLES = ("lm_head.weight", "embed_tokens.weight")


def make_optimizers(model: torch.nn.Module, config: TrainingConfig) -> list[torch.optim.Optimizer]:
    """Optimisers that together hold every trained parameter of `model` once, in fp32 like the parameters.

    Muon (Jordan et al., 2024) orthogonalises the momentum of matrices; scaled by 0.2 sqrt(max(rows, columns)) its update has AdamW's root mean square
    (Liu et al., arXiv 2502.16982), so the learning rate and decay of one serve the other.
    """
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    is_matrix = {name: config.optimizer == "muon" and parameter.dim() == 2 and not name.endswith(_TABLES) for name, parameter in trained.items()}
    matrices = [parameter for name, parameter in trained.items() if is_matrix[name]]
    others = [parameter for name, parameter in trained.items() if not is_matrix[name]]
    settings: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
    beta1, beta2 = config.betas
    made: list[torch.optim.Optimizer] = [torch.optim.AdamW(others, betas=(beta1, beta2), fused=True, **settings)]
    if matrices:
        made.append(torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw", **settings))
    return made


def lr_scale(share: float, step_share: float, config: TrainingConfig) -> float:
    """The learning rate as a share of its peak: a linear warm-up, then the schedule down to `min_lr_ratio` behind the last step.

    Args:
        share: how much of the training lies behind this step, in [0, 1].
        step_share: how much of it one step is.
    """
    if share < config.warmup_ratio:
        return min((share + step_share) / config.warmup_ratio, 1.0)
    if config.schedule == "constant":
        return 1.0
    done = min((share - config.warmup_ratio) / (1 - config.warmup_ratio), 1.0)
    left = 1 - done if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return config.min_lr_ratio + (1 - config.min_lr_ratio) * left
