"""EAGLE-3's training-time test over padded rows: the loss to train on, and the greedy matches to replay.

Draft position j of a row takes the target's states of token j and the token j + 1, at rotary position j + 1. TTT step s predicts token j + 2 + s from the
true tokens up to j + 1 + s and the drafter's own state of step s - 1; its teacher is the target's distribution after token t = j + 1 + s. The result equals
speculators' forward (models/eagle3/core.py; Li et al., arXiv 2503.01840), with three differences of cost: everything outside attention is packed, only
positions that some step supervises go past the keys and values, and attention is that of `attention.py`. And one of meaning: what is supervised is the
*predicted* token, so the first and the last token of an answer both count once per step.

Shapes: B rows, L row length, M = aux layers x hidden, H hidden, A attention heads, G key heads, D head size, V draft vocabulary, S supervised tokens,
T real draft positions of the batch, N needed draft positions, K TTT steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from eagle3.drafter.attention import QueryWindow, ttt_attention
from eagle3.drafter.head_loss import head_loss
from eagle3.errors import DrafterError, TrainingError

if TYPE_CHECKING:
    from speculators.models.eagle3 import Eagle3DraftModel

Normalizer = Literal["supervised", "positions", "rows"]
# Rows of logits held at a time where only their argmax is wanted.
_ARGMAX_CHUNK = 1024


@dataclass(frozen=True)
class TTTBatch:
    """Rows padded on the right; what the padding holds does not matter.

    `loss_mask_BL` is on where the target wrote the token. `aux_BLM` are the auxiliary states of token t at index t; `final_BLH` the final pre-norm state of
    token t, which predicts token t + 1.
    """

    input_ids_BL: Tensor
    loss_mask_BL: Tensor
    lengths_B: Tensor
    aux_BLM: Tensor
    final_BLH: Tensor

    def to(self, device: torch.device | str) -> TTTBatch:
        return TTTBatch(**{each.name: getattr(self, each.name).to(device, non_blocking=True) for each in fields(self)})

    @property
    def real_BL(self) -> Tensor:
        return torch.arange(self.input_ids_BL.shape[1], device=self.lengths_B.device) < self.lengths_B[:, None]

    def count(self, normalizer: Normalizer) -> int:
        """What a sum of losses is divided by: supervised tokens, all tokens, or rows."""
        if normalizer == "supervised":
            # Tokens 0 and 1 have no draft position before them.
            return int((self.loss_mask_BL & self.real_BL)[:, 2:].sum())
        return int(self.lengths_B.sum()) if normalizer == "positions" else len(self.lengths_B)


@dataclass(frozen=True)
class TTTLoss:
    """`loss` has a gradient; per step the mean loss per supervised token, how many were supervised, and how many greedy drafts were the row's own token."""

    loss: Tensor
    num_supervised: int
    step_losses: list[Tensor]
    step_matches: list[Tensor]
    step_counts: list[int]


def ttt_loss(
    drafter: Eagle3DraftModel,
    batch: TTTBatch,
    *,
    num_steps: int,
    step_decay: float = 1.0,
    loss: str = "kl_div",
    normalizer: Normalizer = "supervised",
    denominator: float | None = None,
) -> TTTLoss:
    """Sum over steps s of step_decay^s times the loss of step s, divided by what `normalizer` counts in this batch.

    Args:
        loss: speculators' spec, a name or a JSON object of weights.
        denominator: divide by this instead, so that several batches or ranks make one step; a sum of `batch.count(normalizer)`.

    Raises:
        TrainingError: no supervised token.
        DrafterError: an unknown loss, or rows longer than the drafter's sliding window.
    """
    # Ordered by position, so that a step whose draft would start before the row drops a prefix and the rest are views.
    teacher_S, row_S = (batch.loss_mask_BL & batch.real_BL)[:, 1:].T.nonzero().T.contiguous()
    first_of_step = torch.searchsorted(teacher_S, torch.arange(1, num_steps + 1, device=teacher_S.device)).tolist()
    if first_of_step[0] == len(teacher_S):
        raise TrainingError("A batch without a supervised token reached the loss; rows without one are to be dropped before.")
    needed_BL = torch.zeros_like(batch.loss_mask_BL)
    for step, first in enumerate(first_of_step):
        needed_BL[row_S[first:], teacher_S[first:] - 1 - step] = True
    slot_BL = needed_BL.flatten().cumsum(0).view_as(needed_BL) - 1
    label_S = _draft_labels(drafter, batch.input_ids_BL[row_S, teacher_S + 1])
    states = [
        states_NH[slot_BL[row_S[first:], teacher_S[first:] - 1 - step]]
        for step, (first, states_NH) in enumerate(zip(first_of_step, draft_states(drafter, batch, needed_BL, num_steps)))
    ]
    teacher_SH = _teacher_states(drafter, batch.final_BLH[row_S, teacher_S])
    sum_K, match_K = head_loss(states, first_of_step, drafter.lm_head.weight, teacher_SH, drafter.verifier_lm_head.weight, label_S, loss)
    counts = [len(state) for state in states]
    mean_K = sum_K / torch.tensor(counts, device=sum_K.device).clamp(min=1)
    of_each_K = mean_K if denominator is None and normalizer == "supervised" else sum_K
    total = (of_each_K * step_decay ** torch.arange(num_steps, device=sum_K.device)).sum()
    if denominator is not None or normalizer != "supervised":
        total = total / (denominator or batch.count(normalizer))
    return TTTLoss(total, counts[0], list(mean_K.detach()), list(match_K), counts)


@torch.no_grad()
def draft_matches(drafter: Eagle3DraftModel, batch: TTTBatch, *, num_steps: int) -> list[Tensor]:
    """Where a server's greedy drafts would equal the row: the input of the replay walk.

    Draft positions of a row run from j = p - 1, p its first answer token (the first draft starts behind the token that the prefill gives), to n - 2.

    Returns:
        Per row a bool tensor [n - p, K]: entry [j - (p - 1), s] says whether the draft of step s from position j is token j + 2 + s, given that the earlier
        ones are the row's tokens; false past the row's end.

    Raises:
        DrafterError: a row without an answer token, or rows longer than the drafter's sliding window.
    """
    answer_BL = batch.loss_mask_BL & batch.real_BL
    if not answer_BL.any(dim=1).all():
        raise DrafterError(f"Row {int(answer_BL.any(dim=1).logical_not().nonzero()[0])} of the batch has no answer token to replay.")
    position_L = torch.arange(answer_BL.shape[1], device=answer_BL.device)
    first_B = (answer_BL.int().argmax(dim=1) - 1).clamp(min=0)
    needed_BL = (position_L >= first_B[:, None]) & (position_L <= batch.lengths_B[:, None] - 2)
    row_N, position_N = needed_BL.nonzero(as_tuple=True)
    matches_NK = torch.zeros(len(row_N), num_steps, dtype=torch.bool, device=row_N.device)
    for step, states_NH in enumerate(draft_states(drafter, batch, needed_BL, num_steps)):
        draft_N = torch.cat([drafter.lm_head(chunk).argmax(dim=-1) for chunk in states_NH.split(_ARGMAX_CHUNK)])
        predicted_N = position_N + 2 + step
        label_N = _draft_labels(drafter, batch.input_ids_BL[row_N, predicted_N.clamp(max=len(position_L) - 1)])
        matches_NK[:, step] = (draft_N == label_N) & (predicted_N < batch.lengths_B[row_N])
    return list(matches_NK.split(needed_BL.sum(dim=1).tolist()))


def draft_states(drafter: Eagle3DraftModel, batch: TTTBatch, needed_BL: Tensor, num_steps: int) -> Iterator[Tensor]:
    """Yield per TTT step the normed states [N, H] that go into the head, for the draft positions on in `needed_BL`, row by row."""
    places = _Places.of(batch, needed_BL)
    reach = drafter.sliding_window if drafter.uses_sliding_window_attn else None
    if reach is not None and places.num_keys > reach:
        raise DrafterError(f"The drafter attends to {reach} tokens, but a row has {places.num_keys}: shorten rows or use full attention.")
    attended = [_Attended() for _ in drafter.layers]
    hidden = _fuse_aux(drafter, batch.aux_BLM[places.row_T, places.position_T])
    for step in range(num_steps):
        is_first = step == 0
        row, position = (places.row_T, places.position_T) if is_first else (places.row_N, places.position_N)
        # Past a row's end there is no token to force; the states made there belong to no supervised step.
        token = batch.input_ids_BL[row, (position + 1 + step).clamp(max=batch.input_ids_BL.shape[1] - 1)]
        embeddings = drafter.embed_tokens(token)
        hidden = hidden.to(embeddings.dtype)
        rotary = tuple(table[0] for table in drafter.rotary_emb(hidden, (position + 1 + step)[None]))
        for index, (layer, memory) in enumerate(zip(drafter.layers, attended)):
            narrows = is_first and index == len(attended) - 1
            window = places.needed_window if narrows or not is_first else places.full_window
            hidden = _decoder_layer(layer, embeddings if index == 0 else None, hidden, rotary, memory, window, places, places.needed_T if narrows else None)
        normed = drafter.norm(hidden)
        hidden = normed if drafter.config.norm_output else hidden
        yield normed


@dataclass(frozen=True)
class _Places:
    """Where the batch's draft positions lie: all real ones (T, whose keys are attended to) and those needed (N, a part of them)."""

    row_T: Tensor
    position_T: Tensor
    needed_T: Tensor
    row_N: Tensor
    position_N: Tensor
    num_rows: int
    num_keys: int
    start: int

    @staticmethod
    def of(batch: TTTBatch, needed_BL: Tensor) -> _Places:
        row_N, position_N = needed_BL.nonzero(as_tuple=True)
        num_keys = int(position_N.max()) + 1
        # Real: token j + 1 exists. Later than the last needed position nothing is attended to.
        real_BL = batch.real_BL[:, 1 : num_keys + 1]
        row_T, position_T = real_BL.nonzero(as_tuple=True)
        needed_T = needed_BL[:, : real_BL.shape[1]][real_BL].nonzero().squeeze(1)
        return _Places(row_T, position_T, needed_T, row_N, position_N, len(needed_BL), num_keys, int(position_N.min()))

    @property
    def full_window(self) -> QueryWindow:
        return QueryWindow(self.row_T, self.position_T, 0, self.num_keys, self.num_rows)

    @property
    def needed_window(self) -> QueryWindow:
        return QueryWindow(self.row_N, self.position_N - self.start, self.start, self.num_keys - self.start, self.num_rows)


@dataclass
class _Attended:
    """What one layer's queries see: keys and values of step 0, padded, and those of later steps, packed."""

    step_0: tuple[Tensor, Tensor] | None = None
    diagonal: list[tuple[Tensor, Tensor]] = field(default_factory=list)


def _fuse_aux(drafter: Eagle3DraftModel, aux_TM: Tensor) -> Tensor:
    aux_TM = aux_TM.to(drafter.fc.weight.dtype)
    if drafter.input_norm is not None:
        aux_TM = drafter.input_norm(aux_TM)
    if drafter.fc_norm is not None:
        aux_TM = torch.cat([norm(chunk) for norm, chunk in zip(drafter.fc_norm, aux_TM.chunk(len(drafter.fc_norm), dim=-1))], dim=-1)
    fused: Tensor = drafter.fc(aux_TM)
    return fused


def _decoder_layer(
    layer: Any,
    embeddings: Tensor | None,
    hidden: Tensor,
    rotary: tuple[Tensor, ...],
    memory: _Attended,
    window: QueryWindow,
    places: _Places,
    select: Tensor | None,
) -> Tensor:
    """One of speculators' decoder layers over packed positions; `embeddings` marks the first (model_definitions.py, Eagle3FirstLayerMixin).

    Queries, and all that follows them, are made at `select` only.
    """
    if embeddings is None:
        residual, mixed = hidden, layer.input_layernorm(hidden)
    else:
        normed = layer.hidden_norm(hidden)
        residual = normed if layer.norm_before_residual else hidden
        mixed = torch.cat([layer.input_layernorm(embeddings), normed], dim=-1)
    attention = layer.self_attn
    key = _rotate(_heads(attention, "k", mixed), rotary)
    value = _heads(attention, "v", mixed)
    if select is not None:
        residual, mixed, rotary = residual[select], mixed[select], tuple(table[select] for table in rotary)
    query = _rotate(_heads(attention, "q", mixed), rotary)
    if memory.step_0 is None:
        memory.step_0 = (_pad_keys(key, places, attention), _pad_keys(value, places, attention))
    else:
        memory.diagonal.append((key, value))
    attended = ttt_attention(query, *memory.step_0, memory.diagonal, window, attention.scaling)
    hidden = residual + attention.o_proj(attended.flatten(1))
    output: Tensor = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return output


def _heads(attention: Any, name: str, mixed: Tensor) -> Tensor:
    """Project to queries, keys or values per head: [T or N, A or G, D]. Qwen3 norms queries and keys."""
    heads: Tensor = getattr(attention, f"{name}_proj")(mixed).unflatten(-1, (-1, attention.head_dim))
    norm = getattr(attention, f"{name}_norm", None)
    return heads if norm is None else norm(heads).to(heads.dtype)


def _rotate(heads: Tensor, rotary: tuple[Tensor, ...]) -> Tensor:
    """Rotary embedding (transformers' apply_rotary_pos_emb, for queries or keys alone), in the type of `heads`."""
    cos, sin = (table[:, None] for table in rotary)
    left, right = heads.chunk(2, dim=-1)
    return (heads * cos + torch.cat([-right, left], dim=-1) * sin).to(heads.dtype)


def _pad_keys(heads_TGD: Tensor, places: _Places, attention: Any) -> Tensor:
    """[T, G, D] to [B, A, L, D], each key head repeated for the queries that share it."""
    expanded = heads_TGD.repeat_interleave(attention.num_key_value_groups, dim=1)
    padded = expanded.new_zeros(places.num_rows, places.num_keys, *expanded.shape[1:])
    return padded.index_put((places.row_T, places.position_T), expanded).transpose(1, 2)


@torch.no_grad()
def _teacher_states(drafter: Eagle3DraftModel, final_SH: Tensor) -> Tensor:
    """The target's normed states, in the type that the heads work in: autocast's if it is on."""
    normed: Tensor = drafter.verifier_norm(final_SH.to(drafter.verifier_norm.weight.dtype))
    device = normed.device.type
    return normed.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else normed


def _draft_labels(drafter: Eagle3DraftModel, token: Tensor) -> Tensor:
    """Target tokens as draft ids, -1 for those that the drafter can't propose."""
    if drafter.d2t is None or drafter.t2d is None:
        return token
    draft_id = torch.arange(len(drafter.d2t), device=token.device)
    draft_of_target = token.new_full((len(drafter.t2d),), -1)
    draft_of_target[draft_id + drafter.d2t] = draft_id
    return draft_of_target[token]
