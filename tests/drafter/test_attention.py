"""The flash-and-merge attention against one dense masked softmax in fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from eagle3.drafter.attention import QueryWindow, ttt_attention

NUM_HEADS, NUM_KEY_HEADS, HEAD_DIM = 4, 2, 16
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")])]


def dense_attention(
    query_NAD: Tensor, key_BALD: Tensor, value_BALD: Tensor, diagonal: list[tuple[Tensor, Tensor]], window: QueryWindow, scale: float
) -> Tensor:
    position_N = window.offset_N + window.start
    scores = torch.einsum("nad,nald->nal", query_NAD, key_BALD[window.row_N]) * scale
    later = torch.arange(key_BALD.shape[2], device=query_NAD.device) > position_N[:, None]
    parts, values = [scores.masked_fill(later[:, None], -torch.inf)], [value_BALD[window.row_N]]
    for key_NGD, value_NGD in diagonal:
        key_NAD, value_NAD = (x.repeat_interleave(NUM_HEADS // NUM_KEY_HEADS, dim=1) for x in (key_NGD, value_NGD))
        parts.append((query_NAD * key_NAD).sum(-1, keepdim=True) * scale)
        values.append(value_NAD[:, :, None])
    return torch.einsum("nal,nald->nad", torch.cat(parts, dim=-1).softmax(-1), torch.cat(values, dim=2))


def make_inputs(start: int, num_diagonal: int, device: str) -> tuple[list[Tensor], QueryWindow]:
    torch.manual_seed(start + num_diagonal)
    width, num_rows = 21, 3
    row_N, offset_N = (torch.rand(num_rows, width, device=device) < 0.7).nonzero(as_tuple=True)
    window = QueryWindow(row_N, offset_N, start, width, num_rows)
    step_0 = (num_rows, NUM_HEADS, start + width, HEAD_DIM)
    shapes = [(len(row_N), NUM_HEADS, HEAD_DIM), step_0, step_0] + 2 * num_diagonal * [(len(row_N), NUM_KEY_HEADS, HEAD_DIM)]
    return [torch.randn(shape, dtype=torch.float64, device=device) for shape in shapes], window


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize(("start", "num_diagonal"), [(0, 0), (0, 2), (17, 0), (17, 1), (40, 2)])
def test_equals_a_dense_softmax(start: int, num_diagonal: int, dtype: torch.dtype, tolerance: float, device: str) -> None:
    inputs, window = make_inputs(start, num_diagonal, device)
    results = []
    for attend, kind in ((dense_attention, torch.float64), (ttt_attention, dtype)):
        query, key, value, *flat = leaves = [x.to(dtype).to(kind).requires_grad_() for x in inputs]
        output = attend(query, key, value, list(zip(flat[0::2], flat[1::2])), window, HEAD_DIM**-0.5)
        output.backward(torch.linspace(-1, 1, output.numel(), device=device).reshape(output.shape).to(dtype).to(kind))
        results.append([output.detach(), *(leaf.grad for leaf in leaves)])
    for expected, actual in zip(*results):
        assert actual is not None and actual.dtype == dtype
        torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


def test_keys_after_a_query_get_no_gradient() -> None:
    inputs, _ = make_inputs(start=4, num_diagonal=0, device="cpu")
    query, key, value = (x.float().requires_grad_() for x in inputs)
    window = QueryWindow(torch.tensor([1]), torch.tensor([3]), start=4, width=21, num_rows=3)
    ttt_attention(query[:1], key, value, [], window, 0.25).sum().backward()
    assert value.grad is not None
    assert value.grad.abs().sum(dim=(1, 3)).nonzero().tolist() == [[1, position] for position in range(8)]
