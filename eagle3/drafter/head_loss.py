"""The drafter's head and its loss, chunk by chunk, so that no [S, V] tensor in fp32 exists and the chunk's stays in cache.

Shapes: S supervised tokens, C tokens of one chunk, H hidden, V draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from eagle3.errors import DrafterError

# (draft logits_CV, teacher logits_CV) to (loss_C, gradient of its sum with respect to the draft logits_CV)
LossGradient = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

# 128 rows of 8,192 fp32 logits are 4 MiB: about a core's second-level cache.
_CHUNK = 128


def loss_gradient(spec: str) -> LossGradient:
    """The loss that speculators' spec names ("kl_div", or a JSON object of weights), by its eager implementations.

    Raises:
        DrafterError: an unknown loss.
    """
    from speculators.losses import resolve_loss_config

    try:
        terms = list(resolve_loss_config(spec, "eager").values())
    except ValueError as error:
        raise DrafterError(f"training.loss is not a loss: {error}") from error
    if spec == "kl_div":
        return _kl_div

    def by_autograd(logits_CV: Tensor, teacher_CV: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            leaf = logits_CV.detach()[None].requires_grad_()
            total = torch.stack([weight * loss(leaf, teacher_CV[None])[0] for loss, weight in terms]).sum(dim=0)
            (gradient,) = torch.autograd.grad(total.sum(), leaf)
        return total.detach(), gradient[0]

    return by_autograd


def _kl_div(logits_CV: Tensor, teacher_CV: Tensor) -> tuple[Tensor, Tensor]:
    """KL(p || q) and its gradient q - p, without autograd's extra passes over [C, V]."""
    log_q = logits_CV.log_softmax(dim=-1, dtype=torch.float32)
    log_p = teacher_CV.log_softmax(dim=-1, dtype=torch.float32)
    p = log_p.exp()
    loss_C = torch.linalg.vecdot(p, log_p.sub_(log_q))
    return loss_C, log_q.exp_().sub_(p)


def head_loss(states_SH: Tensor, weight_VH: Tensor, teacher_SV: Tensor, label_S: Tensor, loss: LossGradient) -> tuple[Tensor, Tensor]:
    """Sum of the loss over S tokens, and how many of their greedy drafts are `label_S` (-1: a token the drafter can't propose).

    The matmuls run in `teacher_SV`'s type. Gradients go to `states_SH`, and to `weight_VH` if it is trained.
    """
    return cast(tuple[Tensor, Tensor], _HeadLoss.apply(states_SH, weight_VH, teacher_SV, label_S, loss))


def _num_greedy(logits_CV: Tensor, label_C: Tensor) -> Tensor:
    """How many labels have the highest logit. Not by argmax, which costs more than the loss on a CPU; ties, which only bf16 has, count as matches."""
    label_logit = logits_CV.gather(1, label_C.clamp(min=0)[:, None]).squeeze(1)
    return ((label_logit == logits_CV.amax(dim=-1)) & (label_C >= 0)).sum()


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, teacher: Tensor, labels: Tensor, loss: LossGradient) -> tuple[Tensor, Tensor]:
        states_grad = torch.empty_like(states)
        weight_grad = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        head = weight.to(teacher.dtype)
        total, matches = torch.zeros((), device=states.device), torch.zeros((), dtype=torch.long, device=states.device)
        for start in range(0, len(states), _CHUNK):
            span = slice(start, start + _CHUNK)
            chunk_CH = states[span].to(teacher.dtype)
            logits_CV = chunk_CH @ head.T
            loss_C, gradient_CV = loss(logits_CV, teacher[span])
            gradient_CV = gradient_CV.to(teacher.dtype)
            states_grad[span] = gradient_CV @ head
            if weight_grad is not None:
                weight_grad += gradient_CV.T @ chunk_CH
            total += loss_C.sum()
            matches += _num_greedy(logits_CV, labels[span])
        ctx.save_for_backward(states_grad, *([] if weight_grad is None else [weight_grad]))
        ctx.mark_non_differentiable(matches)
        return total, matches

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        states_grad, *weight_grad = (saved * grads[0] for saved in ctx.saved_tensors)
        return states_grad, weight_grad[0] if weight_grad else None, None, None, None
