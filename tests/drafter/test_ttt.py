"""The TTT loss and replay against speculators' own forward and a token-by-token loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from speculators.losses import resolve_loss_config
from speculators.losses.utils import _LOSS_FN_MAPS
from speculators.models.eagle3 import shift_batch
from torch import Tensor
from transformers import DynamicCache

from eagle3.drafter.ttt import TTTBatch, draft_matches, ttt_loss
from eagle3.errors import DrafterError, TrainingError
from eagle3.training.settings import LOSSES

NUM_STEPS = 3
# (prompt length, answer length) of the rows most tests use.
ROWS = ((5, 9), (8, 3), (4, 20))
Maker = Callable[..., Any]
CASES = [
    {},
    {"norm_before_residual": False},
    {"architecture": "qwen3"},
    {"num_layers": 2},
    {"num_layers": 2, "architecture": "qwen3", "norm_output": True},
    {"fc_norm": True, "norm_output": True},
]


def speculators_loss(drafter: Any, batch: TTTBatch, loss: str, step_decay: float) -> Tensor:
    """Its forward over the same rows, packed as its collate function does; its mask, by teacher position, is ours moved left by one."""
    parts = []
    for row, length in enumerate(batch.lengths_B.tolist()):
        mask = torch.cat([batch.loss_mask_BL[row, 1:length], torch.zeros(1, dtype=torch.bool)])
        sample = {
            "input_ids": batch.input_ids_BL[row, :length],
            "hidden_states": batch.aux_BLM[row, :length],
            "verifier_last_hidden_states": batch.final_BLH[row, :length],
            "loss_mask": mask,
            "lengths": torch.tensor([length]),
            "position_ids": torch.arange(length),
        }
        shifted = shift_batch(sample)
        shifted["document_ids"] = torch.full((length - 1,), row)
        parts.append(shifted)
    packed = {key: torch.cat([part[key] for part in parts])[None] for key in parts[0] if key != "lengths"}
    _, total, _ = drafter(**packed, ttt_steps=NUM_STEPS, ttt_step_loss_decay=step_decay, loss_config=resolve_loss_config(loss, "eager"))
    assert isinstance(total, Tensor)
    return total


def gradients(drafter: Any, loss: Tensor) -> dict[str, Tensor]:
    drafter.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in drafter.named_parameters() if parameter.grad is not None}


def assert_close(actual: Tensor, expected: Tensor, name: str = "", tolerance: float = 1e-5) -> None:
    error = float((actual - expected).norm() / expected.norm())
    assert error < tolerance, f"{name}: relative error {error:.2e}"


def assert_parity(drafter: Any, batch: TTTBatch, loss: str) -> None:
    ours = ttt_loss(drafter, batch, num_steps=NUM_STEPS, step_decay=0.8, loss=loss)
    theirs = speculators_loss(drafter, batch, loss, 0.8)
    assert_close(ours.loss.detach(), theirs.detach(), "loss")
    actual, expected = gradients(drafter, ours.loss), gradients(drafter, theirs)
    assert actual.keys() == expected.keys() == {name for name, parameter in drafter.named_parameters() if parameter.requires_grad}
    for name, gradient in expected.items():
        assert_close(actual[name], gradient, name)


@pytest.mark.parametrize("settings", CASES, ids=str)
def test_loss_and_every_gradient_equal_speculators(make_drafter: Maker, make_batch: Maker, settings: dict[str, Any]) -> None:
    assert_parity(make_drafter(**settings), make_batch(ROWS, padding=2), "kl_div")


@pytest.mark.parametrize("loss", ["ce", "tv", "lk_hybrid", '{"kl_div": 1.0}', '{"ce": 0.1, "jsd": 0.9}'])
def test_every_loss_equals_speculators(make_drafter: Maker, make_batch: Maker, loss: str) -> None:
    assert_parity(make_drafter(), make_batch(ROWS), loss)


def test_the_configuration_knows_every_loss() -> None:
    assert set(LOSSES) == set(_LOSS_FN_MAPS["eager"])


def test_a_trained_head_gets_speculators_gradient(make_drafter: Maker, make_batch: Maker) -> None:
    drafter = make_drafter()
    drafter.lm_head.weight.requires_grad_(True)
    assert_parity(drafter, make_batch(ROWS), "kl_div")


@pytest.mark.parametrize("step", range(NUM_STEPS))
def test_first_and_last_answer_token_are_supervised_once_per_step(make_drafter: Maker, make_batch: Maker, step: int) -> None:
    """Six tokens, answer at 4 and 5 (and at 3 when the mask says so): the teachers are the states right before, each used once, none after the end."""
    drafter = make_drafter()
    batch = make_batch(((4, 2),))

    def step_sum(batch: TTTBatch) -> Tensor:
        result = ttt_loss(drafter, batch, num_steps=step + 1)
        return result.step_losses[step] * result.step_counts[step]

    used = []
    for token in range(6):
        final = batch.final_BLH.clone()
        final[0, token] += 1
        used.append(bool(step_sum(replace(batch, final_BLH=final)) != step_sum(batch)))
    assert used == [False, False, False, True, True, False]
    alone = []
    for token in (4, 5):
        mask = torch.zeros_like(batch.loss_mask_BL)
        mask[0, token] = True
        alone.append(step_sum(replace(batch, loss_mask_BL=mask)))
    torch.testing.assert_close(step_sum(batch), alone[0] + alone[1])


def test_a_draft_before_the_row_is_not_supervised(make_drafter: Maker, make_batch: Maker) -> None:
    result = ttt_loss(make_drafter(), make_batch(((1, 3), (0, 4))), num_steps=NUM_STEPS)
    assert result.step_counts == [4, 2, 0]
    assert result.loss.isfinite()


def test_padding_and_company_do_not_matter(make_drafter: Maker, make_batch: Maker) -> None:
    drafter = make_drafter()
    plain, padded = (gradients(drafter, ttt_loss(drafter, make_batch(ROWS, padding=padding), num_steps=NUM_STEPS).loss) for padding in (0, 13))
    for name, gradient in plain.items():
        assert_close(padded[name], gradient, name, tolerance=1e-6)
    batch = make_batch(ROWS)
    denominator = batch.count("supervised")
    alone = [
        ttt_loss(drafter, TTTBatch(**{key: value[row : row + 1] for key, value in vars(batch).items()}), num_steps=NUM_STEPS, denominator=denominator)
        for row in range(len(ROWS))
    ]
    together = ttt_loss(drafter, batch, num_steps=NUM_STEPS, denominator=denominator)
    torch.testing.assert_close(torch.stack([each.loss for each in alone]).sum(), together.loss)
    assert sum(each.num_supervised for each in alone) == together.num_supervised == denominator


def test_normalizers(make_drafter: Maker, make_batch: Maker) -> None:
    drafter, batch = make_drafter(), make_batch(ROWS)
    losses = [ttt_loss(drafter, batch, num_steps=1, normalizer=name).loss * batch.count(name) for name in ("supervised", "positions", "rows")]
    torch.testing.assert_close(losses[1], losses[0])
    torch.testing.assert_close(losses[2], losses[0])


def test_bf16_is_close(make_drafter: Maker, make_batch: Maker) -> None:
    drafter, batch = make_drafter(), make_batch(ROWS)
    exact = ttt_loss(drafter, batch, num_steps=NUM_STEPS).loss
    with torch.autocast("cpu", torch.bfloat16):
        rough = ttt_loss(drafter, batch, num_steps=NUM_STEPS).loss
    assert_close(rough.detach(), exact.detach(), "loss", tolerance=1e-2)
    actual, expected = gradients(drafter, rough), gradients(drafter, exact)
    for name, gradient in expected.items():
        assert_close(actual[name], gradient, name, tolerance=5e-2)


def test_nothing_supervised_and_unknown_losses_are_errors(make_drafter: Maker, make_batch: Maker) -> None:
    drafter, batch = make_drafter(), make_batch(ROWS)
    with pytest.raises(TrainingError, match="without a supervised token"):
        ttt_loss(drafter, replace(batch, loss_mask_BL=torch.zeros_like(batch.loss_mask_BL)), num_steps=1)
    with pytest.raises(DrafterError, match=r"training\.loss"):
        ttt_loss(drafter, batch, num_steps=1, loss="hinge")
    with pytest.raises(DrafterError, match="Row 1 "):
        draft_matches(drafter, replace(batch, loss_mask_BL=batch.loss_mask_BL & (torch.arange(3) != 1)[:, None]), num_steps=1)


@torch.no_grad()
def loop_drafts(drafter: Any, batch: TTTBatch, row: int, position: int) -> list[int]:
    """What a server drafts from `position`, by speculators' layers and a key-value cache: one token at a time, the row's own tokens forced."""
    cache, ids, last = DynamicCache(), batch.input_ids_BL[row], int(batch.lengths_B[row]) - 1
    hidden = drafter.fc(batch.aux_BLM[row : row + 1, : position + 1])
    tokens, positions = ids[None, 1 : position + 2], torch.arange(1, position + 2)[None]
    drafts = []
    for step in range(NUM_STEPS):
        states = torch.cat([drafter.embed_tokens(tokens), hidden], dim=-1)
        causal = torch.ones(tokens.shape[1], cache.get_seq_length() + tokens.shape[1], dtype=torch.bool).tril(cache.get_seq_length())
        rotary = drafter.rotary_emb(states, positions)
        for layer in drafter.layers:
            states = layer(states, attention_mask=causal[None, None], position_ids=positions, past_key_values=cache, position_embeddings=rotary)
        normed = drafter.norm(states[:, -1:])
        draft = int(drafter.lm_head(normed).argmax())
        drafts.append(draft + int(drafter.d2t[draft]))
        hidden = normed if drafter.config.norm_output else states[:, -1:]
        tokens, positions = ids[None, None, min(position + 2 + step, last)], positions[:, -1:] + 1
    return drafts


@pytest.mark.parametrize("settings", [{}, {"num_layers": 2, "architecture": "qwen3", "norm_output": True}], ids=str)
def test_matches_equal_a_token_by_token_loop(make_drafter: Maker, make_batch: Maker, settings: dict[str, Any]) -> None:
    drafter, batch = make_drafter(**settings), make_batch(ROWS, padding=1)
    # A random drafter never hits: write its own drafts into the rows, from the left, so that some of each step match.
    for row, (prompt, answer) in enumerate(ROWS):
        for position in range(prompt - 1, prompt + answer - 2):
            batch.input_ids_BL[row, position + 2] = loop_drafts(drafter, batch, row, position)[position % 2]
    actual = draft_matches(drafter, batch, num_steps=NUM_STEPS)
    for row, (prompt, answer) in enumerate(ROWS):
        end = prompt + answer
        expected = [
            [
                index < end and draft == int(batch.input_ids_BL[row, index])
                for index, draft in enumerate(loop_drafts(drafter, batch, row, position), position + 2)
            ]
            for position in range(prompt - 1, end - 1)
        ]
        assert actual[row].tolist() == expected
    hits = torch.cat(actual)
    assert 0.2 < hits[:, 0].float().mean() < 0.9
