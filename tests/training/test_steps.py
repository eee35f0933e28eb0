"""What makes up an optimiser step, and how fast it learns."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3.drafter.ttt import TTTBatch
from eagle3.training.batches import CompactRow, count, epoch_steps, micro_batches
from eagle3.training.optimizer import lr_scale, make_optimizers
from eagle3.training.ranks import Ranks
from eagle3.training.settings import TrainingConfig

rows_of = st.lists(st.tuples(st.integers(1, 12), st.integers(0, 20)), min_size=1, max_size=30)


def make_rows(lengths: list[tuple[int, int]]) -> list[CompactRow]:
    return [CompactRow(str(n), torch.zeros(sum(pair), dtype=torch.int32), torch.arange(sum(pair)) >= pair[0]) for n, pair in enumerate(lengths)]


def ids(groups: list[list[CompactRow]]) -> list[str]:
    return sorted(row.id for group in groups for row in group)


@settings(deadline=None, max_examples=40)
@given(lengths=rows_of, batch_tokens=st.integers(1, 50), size=st.integers(1, 4), max_tokens=st.integers(1, 200))
def test_each_row_is_trained_on_once_an_epoch_by_one_process(lengths: list[tuple[int, int]], batch_tokens: int, size: int, max_tokens: int) -> None:
    rows = make_rows(lengths)
    steps = epoch_steps(rows, batch_tokens, seed=3, epoch=1)
    assert ids(steps) == sorted(row.id for row in rows)
    assert all(count(step, "supervised") >= batch_tokens for step in steps[:-1])
    for step in steps:
        parts = [list(Ranks(rank, size).share(step)) for rank in range(size)]
        assert ids(parts) == ids([step]) and max(map(len, parts)) - min(map(len, parts)) <= 1
        groups = list(micro_batches(step, max_tokens))
        assert ids(groups) == ids([step])
        assert all(len(group) == 1 or len(group) * max(len(row.input_ids) for row in group) <= max_tokens for group in groups)


@pytest.mark.parametrize(("normalizer", "expected"), [("supervised", 3 + 3 + 0), ("positions", 8 + 5 + 2), ("rows", 3)])
def test_normalizers_count_a_step_as_the_loss_counts_its_batches(normalizer: str, expected: int) -> None:
    rows = make_rows([(5, 3), (1, 4), (2, 0)])
    lengths = torch.tensor([8, 5, 2])
    mask = torch.nn.utils.rnn.pad_sequence([row.loss_mask for row in rows], batch_first=True, padding_value=1)
    batch = TTTBatch(torch.zeros_like(mask, dtype=torch.long), mask, lengths, torch.empty(0), torch.empty(0))
    # The second token of the second row is supervised by its mask, but no draft position lies before it.
    assert count(rows, normalizer) == batch.count(normalizer) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_the_learning_rate_rises_to_its_peak_and_falls_to_what_is_asked(schedule: str) -> None:
    config = TrainingConfig(schedule=schedule, warmup_ratio=0.1, min_lr_ratio=0.0 if schedule == "constant" else 0.2)
    scales = [lr_scale(step / 100, 1 / 100, config) for step in range(101)]
    assert scales[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert scales[10] == 1.0 and scales[10:] == sorted(scales[10:], reverse=True)
    assert scales[100] == pytest.approx(1.0 if schedule == "constant" else 0.2)
    if schedule != "constant":
        assert scales[55] == pytest.approx(0.6)


def test_muon_takes_the_matrices_and_adamw_the_rest() -> None:
    model = torch.nn.ModuleDict({"fc": torch.nn.Linear(4, 6), "lm_head": torch.nn.Linear(4, 9, bias=False), "norm": torch.nn.LayerNorm(4)})
    model["norm"].bias.requires_grad_(False)
    adamw, muon = make_optimizers(model, TrainingConfig(optimizer="muon", betas=[0.8, 0.9]))
    assert [p is model["fc"].weight for group in muon.param_groups for p in group["params"]] == [True]
    assert {id(p) for group in adamw.param_groups for p in group["params"]} == {
        id(p) for p in (model["fc"].bias, model["lm_head"].weight, model["norm"].weight)
    }
    assert adamw.param_groups[0]["betas"] == (0.8, 0.9)
