"""A tiny random target on disk, drafters for it, and rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from eagle3.drafter.model import new_drafter, save_drafter
from eagle3.drafter.ttt import TTTBatch
from eagle3.drafter.vocabulary import VocabularyMap, build_vocabulary_map

HIDDEN, TARGET_VOCAB, DRAFT_VOCAB, AUX_LAYERS = 64, 500, 150, (1, 2, 3)


@pytest.fixture(scope="session")
def target_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(1)
    config = LlamaConfig(
        hidden_size=HIDDEN,
        vocab_size=TARGET_VOCAB,
        num_hidden_layers=4,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    folder = tmp_path_factory.mktemp("target")
    target = LlamaForCausalLM(config)
    torch.nn.init.uniform_(target.model.norm.weight, 0.5, 1.5)
    target.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def vocabulary() -> VocabularyMap:
    return build_vocabulary_map({token: 1 + token % 7 for token in range(100, 400)}, DRAFT_VOCAB, TARGET_VOCAB)


@pytest.fixture
def make_drafter(target_path: str, vocabulary: VocabularyMap) -> Callable[..., Any]:
    """Build a drafter whose norms are not at their neutral start, so that a forgotten one shows."""

    def make(**settings: Any) -> Any:
        drafter = new_drafter(target_path, AUX_LAYERS, vocabulary, **settings)
        generator = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for name, parameter in drafter.named_parameters():
                scale = parameter.requires_grad * (0.3 if "norm" in name else 0.1)
                parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
        return drafter

    return make


@pytest.fixture(scope="session")
def make_batch() -> Callable[..., TTTBatch]:
    """Build random rows of (prompt, answer) lengths with random states; the padding holds NaN and supervised garbage, which must not matter."""

    def make(rows: Sequence[tuple[int, int]], *, padding: int = 0) -> TTTBatch:
        generator = torch.Generator().manual_seed(3)
        lengths = torch.tensor([prompt + answer for prompt, answer in rows])
        width = int(lengths.max()) + padding
        ids = torch.full((len(rows), width), 7)
        mask = torch.ones(len(rows), width, dtype=torch.bool)
        aux = torch.full((len(rows), width, len(AUX_LAYERS) * HIDDEN), torch.nan)
        final = torch.full((len(rows), width, HIDDEN), torch.nan)
        for row, (prompt, answer) in enumerate(rows):
            end = prompt + answer
            ids[row, :end] = torch.randint(0, TARGET_VOCAB, (end,), generator=generator)
            mask[row, :prompt] = False
            aux[row, :end] = torch.randn(end, aux.shape[2], generator=generator)
            final[row, :end] = torch.randn(end, HIDDEN, generator=generator)
        return TTTBatch(ids, mask, lengths, aux, final)

    return make


@pytest.fixture
def checkpoint(make_drafter: Callable[..., Any], tmp_path: Path) -> Path:
    """A saved drafter that the test may damage."""
    save_drafter(make_drafter(), tmp_path / "drafter")
    return tmp_path / "drafter"
