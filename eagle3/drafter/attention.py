"""Attention of EAGLE-3's training-time test (TTT) in memory linear in the row length.

At TTT step s the query at draft position j attends to the step-0 keys at positions <= j of its own row, and to one key of each step 1..s at j itself
("diagonal"). A dense mask for that is [L, (s + 1) L], nearly all of it empty. Here the step-0 part goes through the flash kernel, which also returns
the log-sum-exp of its scores; the diagonal scores are plain dot products; both are merged by log-sum-exp. Backward hands the flash kernel the *merged*
output and log-sum-exp: its probabilities exp(score - lse) and its rowsum(dO * O) are then those of the whole softmax (as in ring attention,
arXiv 2310.01889), so no part needs a gradient of its own log-sum-exp.

Shapes: B rows, L padded positions of the keys, W positions of the query window, N packed queries, A attention heads, G key heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

_aten = torch.ops.aten
# The memory-efficient kernel stores its log-sum-exp in rows padded to this many queries.
_EFFICIENT_ALIGNMENT = 32


@dataclass(frozen=True)
class QueryWindow:
    """Where N packed queries lie in a padded batch: in row `row_N`, at `start + offset_N`. Before `start` no row has a query; keys end at `start + width`."""

    row_N: Tensor
    offset_N: Tensor
    start: int
    width: int
    num_rows: int

    def scatter(self, packed: Tensor) -> Tensor:
        """[N, A, ...] to [B, A, W, ...], zero where there is no query."""
        padded = packed.new_zeros(self.num_rows, self.width, *packed.shape[1:])
        padded[self.row_N, self.offset_N] = packed
        return padded.transpose(1, 2)

    def gather(self, padded: Tensor) -> Tensor:
        """[B, A, W, ...] to [N, A, ...]."""
        return padded.transpose(1, 2)[self.row_N, self.offset_N]

    def key_parts(self) -> Iterator[tuple[slice, bool]]:
        """The keys as (positions, causal): all queries see everything before the window; inside it they see what is not later than themselves."""
        if self.start:
            yield slice(0, self.start), False
        yield slice(self.start, self.start + self.width), True


def ttt_attention(query_NAD: Tensor, key_BALD: Tensor, value_BALD: Tensor, diagonal: list[tuple[Tensor, Tensor]], window: QueryWindow, scale: float) -> Tensor:
    """Attend each query to the step-0 keys up to its position and to its own diagonal keys.

    Rows are padded on the right, so causality alone hides padding from real queries.

    Args:
        query_NAD: packed queries; fp32, or a half type (required on CUDA for the flash kernel; fp32 takes the memory-efficient one).
        key_BALD, value_BALD: step-0 keys and values, heads already expanded to A; L = window.start + window.width.
        diagonal: one (key_NGD, value_NGD) per later TTT step, heads not expanded.

    Returns:
        [N, A, D] in the type of the queries.
    """
    flat = [tensor for pair in diagonal for tensor in pair]
    return cast(Tensor, _TTTAttention.apply(query_NAD, key_BALD, value_BALD, window, scale, *flat))


class _TTTAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, window: QueryWindow, scale: float, *diagonal: Tensor) -> Tensor:
        queries = window.scatter(query)
        outputs, lses, ctx.kernel_states = [], [], []
        for span, causal in window.key_parts():
            output, lse, state = _flash_forward(queries, key[:, :, span], value[:, :, span], causal, scale)
            outputs.append(window.gather(output))
            lses.append(window.gather(lse))
            ctx.kernel_states.append(state)
        diagonal_keys, diagonal_values = diagonal[0::2], diagonal[1::2]
        lses += [_dot(_grouped(query, key_NGD), key_NGD[:, :, None]).flatten(1) * scale for key_NGD in diagonal_keys]
        lse = torch.stack(lses).logsumexp(dim=0)
        merged = torch.zeros_like(query, dtype=torch.float32)
        for output, part in zip(outputs, lses):
            merged += output * (part - lse).exp()[..., None]
        for value_NGD, part in zip(diagonal_values, lses[len(outputs) :]):
            merged += (_grouped((part - lse).exp(), value_NGD)[..., None] * value_NGD[:, :, None]).flatten(1, 2)
        merged = merged.to(query.dtype)
        ctx.save_for_backward(query, key, value, merged, lse, *diagonal)
        ctx.window, ctx.scale = window, scale
        return merged

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, lse, *diagonal = ctx.saved_tensors
        window: QueryWindow = ctx.window
        grad = grads[0].to(query.dtype)
        queries, outputs, lses, out_grads = (window.scatter(packed) for packed in (query, output, lse, grad))
        key_grad, value_grad = torch.empty_like(key), torch.empty_like(value)
        query_grad = torch.zeros_like(query, dtype=torch.float32)
        for (span, causal), state in zip(window.key_parts(), ctx.kernel_states):
            part, key_grad[:, :, span], value_grad[:, :, span] = _flash_backward(
                out_grads, queries, key[:, :, span], value[:, :, span], outputs, lses, state, causal, ctx.scale
            )
            query_grad += window.gather(part)
        delta = _dot(grad, output)
        diagonal_grads = []
        for key_NGD, value_NGD in zip(diagonal[0::2], diagonal[1::2]):
            grouped_query, grouped_grad = _grouped(query, key_NGD).float(), _grouped(grad, key_NGD).float()
            probability = (_dot(grouped_query, key_NGD[:, :, None]) * ctx.scale - _grouped(lse, key_NGD)).exp()
            score_grad = probability * (_dot(grouped_grad, value_NGD[:, :, None]) - _grouped(delta, key_NGD)) * ctx.scale
            query_grad += (score_grad[..., None] * key_NGD[:, :, None]).flatten(1, 2)
            diagonal_grads.append((score_grad[..., None] * grouped_query).sum(dim=2).to(key_NGD.dtype))
            diagonal_grads.append((probability[..., None] * grouped_grad).sum(dim=2).to(value_NGD.dtype))
        return query_grad.to(query.dtype), key_grad, value_grad, None, None, *diagonal_grads


def _grouped(per_head: Tensor, per_key_head: Tensor) -> Tensor:
    """[N, A, ...] to [N, G, A / G, ...]: the heads that share a key head side by side."""
    num_key_heads = per_key_head.shape[1]
    return per_head.view(len(per_head), num_key_heads, -1, *per_head.shape[2:])


def _dot(left: Tensor, right: Tensor) -> Tensor:
    return (left.float() * right.float()).sum(dim=-1)


def _flash_forward(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
    """Output [B, A, W, D], log-sum-exp [B, A, W], and what the same kernel's backward wants back."""
    if query.device.type == "cpu":
        output, lse = _aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal, scale=scale)
        return output, lse, ()
    if query.dtype == torch.float32:
        output, lse, seed, offset = _aten._scaled_dot_product_efficient_attention(query, key, value, None, True, 0.0, causal, scale=scale)
        return output, lse[..., : query.shape[2]], (seed, offset)
    output, lse, *state, _debug_mask = _aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, scale=scale)
    return output, lse, tuple(state)


def _flash_backward(
    out_grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, state: tuple[Any, ...], causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, each [B, A, W or L, D]."""
    if query.device.type == "cpu":
        # In fp32: this kernel's bf16 backward takes three to five times as long.
        inputs = (tensor.float() for tensor in (out_grad, query, key, value, output))
        grads = _aten._scaled_dot_product_flash_attention_for_cpu_backward(*inputs, lse, 0.0, causal, scale=scale)
    elif query.dtype == torch.float32:
        seed, offset = state
        lse = functional.pad(lse, (0, -lse.shape[2] % _EFFICIENT_ALIGNMENT), value=torch.inf).contiguous()
        grads = _aten._scaled_dot_product_efficient_attention_backward(
            out_grad, query, key, value, None, output, lse, seed, offset, 0.0, [True, True, True, False], causal, scale=scale
        )[:3]
    else:
        cum_query, cum_key, max_query, max_key, seed, offset = state
        sizes = (cum_query, cum_key, max_query, max_key)
        grads = _aten._scaled_dot_product_flash_attention_backward(
            out_grad, query, key, value, output, lse.contiguous(), *sizes, 0.0, causal, seed, offset, scale=scale
        )
    return cast(tuple[Tensor, Tensor, Tensor], tuple(grads))
