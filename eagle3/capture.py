"""Hidden states of finished rows, from the target in this process.

Shapes: `B` rows of a batch, `L` row length, `A` auxiliary layers, `H` hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from eagle3.config import CaptureConfig
from eagle3.conversation import Row
from eagle3.errors import CaptureError
from eagle3.hidden_states import StateReader, StateWriter
from eagle3.progress import progress

NUM_CHECKED_ROWS = 64


def capture_rows(
    rows: Sequence[Row], new_model: Callable[[], Any], folder: Path, config: CaptureConfig, aux_layers: Sequence[int], temperature: float, name: str
) -> dict[str, Any]:
    """Capture the states of those rows that `folder` has none of, then check what lies there against the target's own head.

    Args:
        new_model: gives the target.
        temperature: the one the answers were sampled at; the head check allows for it.

    Returns:
        rows, tokens and bytes of all rows asked for; captured_now; head_agreement (see the function of that name).

    Raises:
        CaptureError: states that are not finite, or not those of the target's last layer.
    """
    reader = StateReader(folder)
    missing = [row for row in rows if row.id not in reader]
    model = new_model()
    if missing:
        writer = StateWriter(folder, [*aux_layers, model.config.get_text_config().num_hidden_layers], config.shard_bytes)
        capture = TransformersCapture(model, aux_layers, config.batch_tokens)
        with progress(name, len(missing), "rows") as update:
            for done, (index, states) in enumerate(capture.states([row.input_ids for row in missing], [row.id for row in missing]), 1):
                writer.append(missing[index].id, missing[index].input_ids, states)
                update(done, "")
        writer.flush()
        reader = StateReader(folder)
    agreement = _agreement(rows[:: max(len(rows) // NUM_CHECKED_ROWS, 1)], reader, model, temperature)
    if agreement < config.min_head_agreement:
        raise CaptureError(
            f"the target's head finds only {agreement:.1%} of the tokens it should in the captured final states, less than capture.min_head_agreement="
            f"{config.min_head_agreement:.0%}: they are not from its last layer, or the answers are another model's; delete {folder} and capture again."
        )
    tokens = sum(len(row.input_ids) for row in rows)
    num_bytes = tokens * (len(aux_layers) + 1) * model.config.get_text_config().hidden_size * 2
    return {"rows": len(rows), "tokens": tokens, "bytes": num_bytes, "captured_now": len(missing), "head_agreement": agreement}


def _agreement(rows: Sequence[Row], reader: StateReader, model: Any, temperature: float) -> float:
    """Head agreement over some rows (CASES: TorchSpec#87, vllm#46788, where the layer before the last was captured)."""
    norm, head = model.get_decoder().norm, model.get_output_embeddings()
    shares = [head_agreement(reader.read(row.id, row.input_ids), row.input_ids, row.loss_mask, norm, head, temperature) for row in rows]
    return sum(shares) / len(shares)


class TransformersCapture:
    """Runs a transformers model over rows and keeps what enters the auxiliary layers and the last norm.

    Auxiliary id i is the state that enters layer i (the output of layer i - 1), as vLLM and speculators number them; id n is the final
    state, before the norm (`output_hidden_states[-1]` of transformers is already normed). The LM head is not run.
    `batch_tokens` bounds the padded tokens of one forward; it changes speed and memory only.
    """

    def __init__(self, model: Any, aux_layers: Sequence[int], batch_tokens: int = 4_096) -> None:
        self.decoder: Any = model.get_decoder()
        layers, norm = getattr(self.decoder, "layers", None), getattr(self.decoder, "norm", None)
        if layers is None or norm is None:
            raise CaptureError(f"{type(self.decoder).__name__} has no `layers` and `norm` to read states from; set capture to a vLLM backend")
        out_of_range = [i for i in aux_layers if not 0 <= i <= len(layers)]
        if out_of_range:
            raise CaptureError(f"auxiliary layers {out_of_range} are not among the 0 .. {len(layers)} of this target; correct capture.aux_layers")
        self.points: list[nn.Module] = [*(norm if i == len(layers) else layers[i] for i in aux_layers), norm]
        self.batch_tokens = batch_tokens

    def states(
        self, rows: Sequence[Sequence[int]], names: Sequence[str] | None = None, on_damaged: Callable[[int, CaptureError], None] | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield (index, states [L, A + 1, H] in bfloat16, on the CPU) for each row of ids, short rows first; the final state is the last of the A + 1.

        A row with a state that is not finite raises CaptureError naming it (by `names`, else by index), or goes to `on_damaged` and is left out.
        """
        for batch in _batches([len(ids) for ids in rows], self.batch_tokens):
            states = self._forward([rows[index] for index in batch])
            for i, index in enumerate(batch):
                own = states[i, : len(rows[index])].clone()  # not a view: a row kept must not keep its whole batch
                if torch.isfinite(own).all():
                    yield index, own
                    continue
                error = CaptureError(f"row {names[index] if names else index}: the target's hidden states are not finite; leave the row out or use float32")
                if on_damaged is None:
                    raise error
                on_damaged(index, error)

    @torch.inference_mode()
    def _forward(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """[B, L, A + 1, H] for rows padded on the right, which causal attention never looks at."""
        device = next(self.decoder.parameters()).device
        longest = max(len(ids) for ids in rows)
        input_ids = torch.zeros(len(rows), longest, dtype=torch.long)
        for i, ids in enumerate(rows):
            input_ids[i, : len(ids)] = torch.as_tensor(ids)
        seen: dict[nn.Module, Tensor] = {}

        def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            seen[module] = args[0] if args else kwargs["hidden_states"]

        hooks = [module.register_forward_pre_hook(keep, with_kwargs=True) for module in set(self.points)]
        try:
            self.decoder(input_ids.to(device), use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()
        return torch.stack([seen[module].to(torch.bfloat16) for module in self.points], dim=2).cpu()


@torch.inference_mode()
def head_agreement(states: Tensor, input_ids: Sequence[int], loss_mask: Sequence[int], norm: nn.Module, lm_head: nn.Module, temperature: float = 0.0) -> float:
    """Share of the target's own tokens that its head predicts from the captured final states [L, A + 1, H], of the share it should at `temperature`.

    A greedy answer is all argmax; of a sampled one, the head itself says how often its likeliest token is drawn. So it is near 1 when the right layer
    was captured; SmolLM2's states one layer early gave 0.5. The state of position j predicts token j + 1; only tokens the target produced count.
    Raises CaptureError when there is none.
    """
    weight = next(lm_head.parameters())
    ids = torch.as_tensor(input_ids, device=weight.device)
    produced = torch.as_tensor(loss_mask, device=weight.device)[1:].bool()
    if not produced.any():
        raise CaptureError("no token of the row was produced by the target, so its states can't be checked against its head")
    final = states[:-1, -1].to(weight.device, weight.dtype)[produced]
    logits = lm_head(norm(final))
    expected = (logits.float() / temperature).softmax(-1).max(-1).values.mean() if temperature else torch.ones(())
    return float((logits.max(-1).indices == ids[1:][produced]).float().mean() / expected.cpu())


def _batches(lengths: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """Indices of rows of similar length, at most `batch_tokens` padded tokens together (a longer row goes alone)."""
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        if batch and (len(batch) + 1) * lengths[index] > batch_tokens:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch
