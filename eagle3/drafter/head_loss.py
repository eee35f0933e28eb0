"""The heads of target and drafter, and the loss between them, chunk by chunk: no [S, V] tensor exists, and a chunk's stays in cache.

Shapes: S supervised tokens, C tokens of one chunk, H hidden, V draft vocabulary, K TTT steps.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from eagle3.errors import DrafterError

# What a loss makes of the teacher's logits [C, V] once for all steps, and then (draft logits [C, V], that) to (loss [C], gradient of its sum [C, V]).
Prepare = Callable[[Tensor], Any]
LossGradient = Callable[[Tensor, Any], tuple[Tensor, Tensor]]

# 128 rows of 8,192 fp32 logits are 4 MiB: about a core's second-level cache.
_CHUNK = 128


@functools.cache
def loss_gradient(spec: str) -> tuple[Prepare, LossGradient]:
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
        return _teacher_distribution, _kl_div

    def by_autograd(logits_CV: Tensor, teacher_CV: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            leaf = logits_CV.detach()[None].requires_grad_()
            total = torch.stack([weight * loss(leaf, teacher_CV[None])[0] for loss, weight in terms]).sum(dim=0)
            (gradient,) = torch.autograd.grad(total.sum(), leaf)
        return total.detach(), gradient[0]

    return (lambda teacher_CV: teacher_CV), by_autograd


def _teacher_distribution(teacher_CV: Tensor) -> tuple[Tensor, Tensor]:
    """p [C, V] and its negative entropy [C], in fp32."""
    log_p = teacher_CV.log_softmax(dim=-1, dtype=torch.float32)
    p = log_p.exp()
    return p, torch.linalg.vecdot(p, log_p)


def _kl_div(logits_CV: Tensor, teacher: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """KL(p || q) and its gradient q - p, without autograd's extra passes over [C, V]."""
    p, negative_entropy_C = teacher
    log_q = logits_CV.log_softmax(dim=-1, dtype=torch.float32)
    loss_C = negative_entropy_C - torch.linalg.vecdot(p, log_q)
    return loss_C, log_q.exp_().sub_(p)


def head_loss(
    states: Sequence[Tensor], first: Sequence[int], head_VH: Tensor, teacher_SH: Tensor, teacher_head_VH: Tensor, label_S: Tensor, loss: str
) -> tuple[Tensor, Tensor]:
    """The loss of each TTT step summed over its tokens [K], and how many of the step's greedy drafts are the label [K].

    Args:
        states: of each step the drafter's normed states [S - first[step], H]: those of tokens first[step] .. S.
        teacher_SH: the target's normed states; their logits are made here, in their type, once for all steps.
        label_S: draft ids, -1 for a token that the drafter can't propose.

    Gradients go to `states`, and to `head_VH` if it is trained. The matmuls run in the teacher's type.
    """
    # Types are chosen by hand in there; autocast would round the dot products that a loss is the small difference of.
    with torch.autocast(teacher_SH.device.type, enabled=False):
        sums, matches = _HeadLoss.apply(head_VH, teacher_SH, teacher_head_VH, label_S, tuple(first), loss_gradient(loss), *states)
    return sums, matches


def _num_greedy(logits_CV: Tensor, label_C: Tensor) -> Tensor:
    """How many labels have the highest logit. Not by argmax, which costs more than the loss on a CPU; ties, which only bf16 has, count as matches."""
    label_logit = logits_CV.gather(1, label_C.clamp(min=0)[:, None]).squeeze(1)
    return ((label_logit == logits_CV.amax(dim=-1)) & (label_C >= 0)).sum()


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        head: Tensor,
        teacher: Tensor,
        teacher_head: Tensor,
        labels: Tensor,
        first: tuple[int, ...],
        loss: tuple[Prepare, LossGradient],
        *states: Tensor,
    ) -> tuple[Tensor, Tensor]:
        prepare, gradient_of = loss
        state_grads = [torch.empty_like(state) for state in states]
        # Each step is a loss of its own, so a trained head needs a gradient for each.
        head_grads = torch.zeros(len(states), *head.shape, device=head.device) if ctx.needs_input_grad[0] else None
        weight, teacher_weight = head.to(teacher.dtype), teacher_head.to(teacher.dtype)
        sums = torch.zeros(len(states), device=teacher.device)
        matches = torch.zeros(len(states), dtype=torch.long, device=teacher.device)
        for start in range(0, len(teacher), _CHUNK):
            stop = min(start + _CHUNK, len(teacher))
            # A chunk that some steps begin inside of is prepared apart for them; there are at most K - 1 of those.
            for begin in sorted({max(start, begin) for begin in first if begin < stop}):
                prepared = prepare(teacher[begin:stop] @ teacher_weight.T)
                for step in [step for step, own in enumerate(first) if max(start, own) == begin]:
                    span = slice(begin - first[step], stop - first[step])
                    chunk_CH = states[step][span].to(teacher.dtype)
                    logits_CV = chunk_CH @ weight.T
                    loss_C, gradient_CV = gradient_of(logits_CV, prepared)
                    gradient_CV = gradient_CV.to(teacher.dtype)
                    state_grads[step][span] = gradient_CV @ weight
                    if head_grads is not None:
                        head_grads[step] += gradient_CV.T @ chunk_CH
                    sums[step] += loss_C.sum()
                    matches[step] += _num_greedy(logits_CV, labels[begin:stop])
        ctx.save_for_backward(*state_grads, *([] if head_grads is None else [head_grads]))
        ctx.num_steps = len(states)
        ctx.mark_non_differentiable(matches)
        return sums, matches

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved, of_sums = ctx.saved_tensors, grads[0]
        state_grads = [grad * of_sums[step] for step, grad in enumerate(saved[: ctx.num_steps])]
        head_grad = torch.einsum("k,kvh->vh", of_sums, saved[-1]) if len(saved) > ctx.num_steps else None
        return (head_grad, None, None, None, None, None, *state_grads)
