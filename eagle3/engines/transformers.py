"""The target in this process: a decode loop over a slotted key/value cache, for targets that fit on the machine at hand.

Rows join and leave the running batch at any step (continuous batching), so one long answer holds nobody up. A prompt is read up to its
last token without the LM head; that token is then the first one decoded, so logits are only ever made in one place, for one token per row.

Shapes: `B` rows in the batch, `L` tokens of the longest row, `G` key/value heads, `H` query heads, `D` head size, `V` vocabulary.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from eagle3.conversation import Answer, Failure, Request
from eagle3.engines import Sampling
from eagle3.errors import EngineError

ATTENTION = "eagle3_slots"
SMALLEST_CAPACITY = 256


class TransformersEngine:
    """Answers requests with a model of `eagle3.targets.load_model`, up to `batch_size` rows at once.

    `cache_tokens` bounds the key/value cache (rows x longest row): when answers grow past it, the newest rows go back to the queue and
    continue later from where they were. `prefill_tokens` bounds the padded tokens of one reading of prompts.
    None of the three changes an answer, beyond the rounding of a differently shaped matrix product.
    """

    def __init__(
        self,
        model: Any,
        sampling: Sampling,
        *,
        batch_size: int = 128,
        cache_tokens: int = 131_072,
        prefill_tokens: int = 4_096,
    ) -> None:
        config = model.config.get_text_config()
        _check_supported(config, model)
        model.set_attn_implementation(ATTENTION)
        self.model = model
        self.sampling = sampling
        self.max_len = min(sampling.max_seq_len, config.max_position_embeddings)
        self.batch_size, self.cache_tokens, self.prefill_tokens = batch_size, cache_tokens, prefill_tokens
        self.provenance = {"engine": "transformers", "dtype": str(model.dtype).removeprefix("torch.")}

    async def answer(self, requests: Iterable[Request]) -> AsyncIterator[Answer | Failure]:
        """Yield each request's answer as it ends. The event loop gets a turn after every decode step."""
        batch = _Batch(self.model, self.sampling, SlotCache(self.batch_size, self.cache_tokens), self.prefill_tokens)
        for request in requests:
            failure = self._refuse(request)
            if failure:
                yield failure
            else:
                batch.waiting.append(_Row(request, self.sampling, self.max_len))
        while batch.waiting or batch.active:
            for row in batch.step():
                yield Answer(row.request.prompt_id, row.request.turn, row.request.prompt_ids, row.completion_ids, row.finish_reason, dict(self.provenance))
            await asyncio.sleep(0)

    def _refuse(self, request: Request) -> Failure | None:
        if not request.prompt_ids:
            return Failure(request.prompt_id, request.turn, "empty", "the prompt has no tokens")
        if len(request.prompt_ids) >= self.max_len:
            message = f"the prompt has {len(request.prompt_ids)} tokens and leaves no room for an answer within {self.max_len}"
            return Failure(request.prompt_id, request.turn, "too_long", message)
        return None


class _Batch:
    """The rows being answered and those that wait. Row i of `active` lives in slot i of the cache."""

    def __init__(self, model: Any, sampling: Sampling, cache: SlotCache, prefill_tokens: int) -> None:
        self.model, self.sampling, self.cache, self.prefill_tokens = model, sampling, cache, prefill_tokens
        self.active: list[_Row] = []
        self.waiting: deque[_Row] = deque()

    @torch.inference_mode()
    def step(self) -> list[_Row]:
        """Give every active row one more token; returns the rows that ended with it."""
        self._fit_cache()
        # Reading a few prompts costs a pass over all weights, so free slots are filled by the handful.
        if not self.active or self.cache.num_slots - len(self.active) >= self.cache.num_slots // 8:
            self._admit()
        for row, token in zip(self.active, self._next_tokens(), strict=True):
            row.append(token)
        ended = [slot for slot, row in enumerate(self.active) if row.finish_reason]
        finished = [self.active[slot] for slot in ended]
        for slot in reversed(ended):  # the last row moves into the gap
            last = self.active.pop()
            if slot < len(self.active):
                self.cache.move(len(self.active), slot, len(last.ids))
                self.active[slot] = last
        return finished

    def _fit_cache(self) -> None:
        """Give every slot room for the longest row; rows whose slot that costs wait again, with what they have written."""
        longest = max((len(row.ids) for row in self.active), default=1)
        if not self.cache.fits(longest):
            self.cache.resize(longest, used=len(self.active))
            while len(self.active) > self.cache.num_slots:
                self.waiting.appendleft(self.active.pop())

    def _admit(self) -> None:
        """Fill the free slots in queue order and read the new prompts, those of similar length together."""
        joining: list[_Row] = []
        while self.waiting and len(self.active) + len(joining) < self.cache.slots_for(max(len(self.waiting[0].ids), self.cache.capacity)):
            joining.append(self.waiting.popleft())
            if len(joining[-1].ids) > self.cache.capacity:
                self.cache.resize(len(joining[-1].ids), used=len(self.active))
        joining.sort(key=lambda row: len(row.ids))
        while joining:
            size = max(1, self.prefill_tokens // len(joining[-1].ids))
            rows, joining = joining[-size:], joining[:-size]
            self._read(rows)
            self.active += rows

    def _read(self, rows: list[_Row]) -> None:
        """Put the states of all but each row's last token into the next slots. Right padding is never seen: attention is causal."""
        width = max(len(row.ids) for row in rows) - 1
        if width == 0:
            return
        ids = torch.zeros(len(rows), width, dtype=torch.long)
        for i, row in enumerate(rows):
            ids[i, : len(row.ids) - 1] = torch.tensor(row.ids[:-1])
        ids = ids.to(self.model.device)
        positions = torch.arange(width, device=ids.device).expand(len(rows), -1)
        self.cache.read_into(len(self.active))
        self.model.get_decoder()(ids, position_ids=positions, past_key_values=self.cache, use_cache=True)

    def _next_tokens(self) -> list[int]:
        """One decode step: each active row's last token goes in, its next token comes out."""
        device, rows = self.model.device, self.active
        last = torch.tensor([[row.ids[-1]] for row in rows], device=device)
        positions = torch.tensor([len(row.ids) - 1 for row in rows], device=device)
        length = max(len(row.ids) for row in rows)
        seen = torch.arange(length, device=device) <= positions[:, None]
        mask = torch.zeros(seen.shape, dtype=self.model.dtype, device=device).masked_fill_(~seen, -torch.inf)[:, None, None]
        self.cache.decode_at(positions, length)
        out = self.model(last, position_ids=positions[:, None], attention_mask=mask, past_key_values=self.cache, use_cache=True)
        logits = out.logits[:, -1]
        best = logits.max(-1)  # the first of equal logits, as argmax, and five times as fast in bf16 on a CPU
        if not torch.isfinite(best.values).all():
            raise EngineError("the target's logits are not finite; its weights are damaged, or it needs engine.dtype=float32")
        if self.sampling.temperature == 0:
            tokens: list[int] = best.indices.tolist()
            return tokens
        return sample(logits, self.sampling.temperature, self.sampling.top_p, [row.draws for row in rows])


class _Row:
    """A request on its way: the ids so far, and its own stream of random numbers."""

    def __init__(self, request: Request, sampling: Sampling, max_len: int) -> None:
        self.request = request
        self.ids = list(request.prompt_ids)
        self.end = min(len(self.ids) + sampling.max_completion_tokens, max_len)
        self.stop_ids = frozenset(sampling.stop_ids)
        self.finish_reason = ""
        # A str seed is hashed (SHA-512), the same on every Python and machine.
        self.draws = random.Random(f"{sampling.seed}/{request.prompt_id}/{request.turn}")

    @property
    def completion_ids(self) -> list[int]:
        return self.ids[len(self.request.prompt_ids) :]

    def append(self, token: int) -> None:
        self.ids.append(token)
        if token in self.stop_ids:
            self.finish_reason = "stop"
        elif len(self.ids) >= self.end:
            self.finish_reason = "length"


class SlotCache:
    """Keys and values of up to `batch_size` rows, each from position 0 of its own slot, written in place.

    It stands where transformers expects its `Cache` and implements the two methods that attention layers and models call.
    `capacity` (tokens per slot) follows the longest row, and `num_slots` is what `max_tokens` then allows.
    """

    def __init__(self, batch_size: int, max_tokens: int) -> None:
        self.batch_size, self.max_tokens = batch_size, max_tokens
        self.capacity = SMALLEST_CAPACITY
        self.num_slots = self.slots_for(SMALLEST_CAPACITY)
        self.keys: list[Tensor] = []  # per layer [slots, G, capacity, D]
        self.values: list[Tensor] = []
        self._first_slot: int | None = None
        self._positions: Tensor = torch.empty(0, dtype=torch.long)
        self._length = 0

    def slots_for(self, length: int) -> int:
        return max(1, min(self.batch_size, self.max_tokens // _capacity_for(length)))

    def fits(self, length: int) -> bool:
        """True when rows of `length` fit and the capacity is not so large that it costs slots for nothing."""
        return length <= self.capacity and (self.num_slots == self.batch_size or _capacity_for(length) * 4 > self.capacity)

    def resize(self, length: int, used: int) -> None:
        """Make room for `length` tokens a slot, keeping the first `used` slots as far as there are that many."""
        self.capacity, self.num_slots = _capacity_for(length), self.slots_for(length)
        kept = min(used, self.num_slots)
        for store in (self.keys, self.values):
            for layer, old in enumerate(store):
                tokens = min(old.shape[2], self.capacity)
                store[layer] = old.new_zeros(self.num_slots, old.shape[1], self.capacity, old.shape[3])
                store[layer][:kept, :, :tokens] = old[:kept, :, :tokens]

    def move(self, source: int, target: int, length: int) -> None:
        for store in (self.keys, self.values):
            for layer in store:
                layer[target, :, :length] = layer[source, :, :length]

    def read_into(self, first_slot: int) -> None:
        """The next forward reads whole prompts; row i of it belongs to slot `first_slot` + i."""
        self._first_slot = first_slot

    def decode_at(self, positions: Tensor, length: int) -> None:
        """The next forward adds one token to each of the first slots, at `positions` [B]; attention then sees `length` tokens."""
        self._first_slot, self._positions, self._length = None, positions, length

    def update(self, keys: Tensor, values: Tensor, layer: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store [B, G, new, D] keys and values of one layer and return those that the new tokens attend to."""
        while len(self.keys) <= layer:
            # Zeros, not empty: what is masked still enters a product with weight 0, and 0 x NaN is NaN.
            self.keys.append(keys.new_zeros(self.num_slots, keys.shape[1], self.capacity, keys.shape[3]))
            self.values.append(values.new_zeros(self.num_slots, values.shape[1], self.capacity, values.shape[3]))
        stored_keys, stored_values = self.keys[layer], self.values[layer]
        num_rows, new = keys.shape[0], keys.shape[2]
        if self._first_slot is not None:
            slots = slice(self._first_slot, self._first_slot + num_rows)
            stored_keys[slots, :, :new], stored_values[slots, :, :new] = keys, values
            return keys, values
        rows = torch.arange(num_rows, device=keys.device)
        stored_keys[rows, :, self._positions], stored_values[rows, :, self._positions] = keys[:, :, 0], values[:, :, 0]
        return stored_keys[:num_rows, :, : self._length], stored_values[:num_rows, :, : self._length]

    def get_seq_length(self, layer: int = 0) -> int:
        return 0  # positions are always passed explicitly


def _capacity_for(length: int) -> int:
    return max(SMALLEST_CAPACITY, 1 << (length - 1).bit_length())


def attend(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None = None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Causal attention over whole prompts (no mask), or one query per row over the cache (mask [B, 1, 1, L]).

    In the second case the query heads that share a key/value head become that head's queries, so keys and values are read once
    and never repeated in memory. Returns [B, L, H, D], as transformers asks of an attention function.
    """
    num_rows, num_heads, _, size = query.shape
    groups = key.shape[1]
    if mask is None:
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=groups != num_heads)
    else:
        out = F.scaled_dot_product_attention(query.reshape(num_rows, groups, -1, size), key, value, attn_mask=mask, scale=scaling)
        out = out.reshape(num_rows, num_heads, 1, -1)
    return out.transpose(1, 2).contiguous(), None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, attend)


def sample(logits: Tensor, temperature: float, top_p: float, draws: Sequence[random.Random]) -> list[int]:
    """Draw one token per row of `logits` [B, V] from its nucleus: the likeliest tokens that together reach `top_p`.

    Each row draws from the whole distribution with its own stream and tries again when the token lies outside the nucleus, that is, when the
    tokens likelier than it already reach `top_p`. That is exact and needs no sort (FlashInfer samples so too). A row's token depends on its
    own stream and logits alone.
    """
    probs = (logits.float() / temperature).softmax(-1)
    sums = probs.cumsum(-1, dtype=torch.float64)
    tokens = torch.zeros(len(draws), dtype=torch.long, device=logits.device)
    pending = torch.arange(len(draws), device=logits.device)
    while True:
        uniform = torch.tensor([draws[i].random() for i in pending.tolist()], dtype=torch.float64, device=logits.device)
        drawn = torch.searchsorted(sums, (uniform * sums[:, -1])[:, None], right=True).clamp_(max=logits.shape[-1] - 1)
        tokens[pending] = drawn[:, 0]
        if top_p >= 1:
            break
        likelier = probs.masked_fill(probs <= probs.gather(1, drawn), 0).sum(-1)
        again = likelier >= top_p
        if not again.any():
            break
        pending, probs, sums = pending[again], probs[again], sums[again]
    drawn_tokens: list[int] = tokens.tolist()
    return drawn_tokens


def _check_supported(config: Any, model: Any) -> None:
    """Refuse targets whose layers don't all attend to everything through transformers' attention interface."""
    kinds = set(getattr(config, "layer_types", None) or (["sliding_attention"] if getattr(config, "sliding_window", None) else ["full_attention"]))
    if kinds != {"full_attention"} or not getattr(model, "_supports_attention_backend", False):
        raise EngineError(f"engine=transformers runs plain full-attention models and this {config.model_type} is not one; use engine=vllm")
