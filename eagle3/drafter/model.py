"""Making, saving and loading a drafter. Model, config and checkpoint are speculators', so vLLM serves what is saved here as it is."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from eagle3.drafter.vocabulary import VocabularyMap
from eagle3.errors import DrafterError

if TYPE_CHECKING:
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

# Needs no accelerator; our own forward never calls it, speculators' (the reference in tests) does.
_ATTENTION = "sdpa"
# speculators adds its own config.py.
_CHECKPOINT_SUFFIXES = (".json", ".safetensors", ".py")
# Copied from the target whenever a drafter is made or loaded, never saved.
_TARGET_OWNED = ("verifier_norm.weight", "verifier_lm_head.weight")


def new_drafter(
    target_path: str,
    aux_layers: Sequence[int],
    vocabulary: VocabularyMap,
    *,
    architecture: str = "llama",
    num_layers: int = 1,
    intermediate_size: int | None = None,
    ttt_steps: int = 3,
    norm_before_residual: bool = True,
    fc_norm: bool = False,
    norm_output: bool = False,
    seed: int = 0,
) -> Eagle3DraftModel:
    """Make an untrained fp32 drafter for the target at `target_path`: full attention, embeddings and head copied from the target and frozen.

    Args:
        aux_layers: the target layers whose states the drafter reads.
        architecture: "llama" or "qwen3" decoder layers.
        intermediate_size: the MLP's width; default the target's, or three times the hidden size if the target is all experts.
        ttt_steps: draft tokens per verification written to the checkpoint as the default.
        seed: decides every random weight; the global random state is left as it was.

    Raises:
        DrafterError: the target can't be read, or these settings do not fit it.
    """
    from speculators.models.eagle3 import Eagle3DraftModel
    from speculators.train.cli import create_transformer_layer_config

    target = _absolute(target_path)
    with quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            layer_config = create_transformer_layer_config(
                target, num_layers, architecture, None, sliding_window=0, full_attention_indices=list(range(num_layers))
            )
            layer_config.sliding_window = None
            layer_config.intermediate_size = intermediate_size or layer_config.intermediate_size
            drafter = Eagle3DraftModel.from_training_args(
                layer_config,
                t2d=vocabulary.t2d,
                d2t=vocabulary.d2t,
                draft_vocab_size=len(vocabulary.d2t),
                norm_before_residual=norm_before_residual,
                fc_norm=fc_norm,
                norm_output=norm_output,
                target_layer_ids=list(aux_layers),
                verifier_name_or_path=target,
                draft_attn_impl=_ATTENTION,
                ttt_steps=ttt_steps,
            )
        except (OSError, ValueError, AttributeError, RuntimeError) as error:
            raise DrafterError(f"No drafter can be made for the target {target_path}: {error}") from error
    _refuse_nan(drafter.state_dict(), f"the target {target_path}")
    drafter.float()
    return drafter


def save_drafter(drafter: Eagle3DraftModel, folder: Path) -> None:
    """Write a checkpoint that appears under its name only when complete: weights with embeddings, head, d2t and t2d, and config.json.

    A drafter saved there before is replaced.

    Raises:
        DrafterError: `folder` holds something else.
    """
    foreign = [path.name for path in folder.glob("*") if path.suffix not in _CHECKPOINT_SUFFIXES]
    if foreign:
        raise DrafterError(f"{folder} holds {foreign[0]}, which is no part of a drafter; save to a folder of its own.")
    staging = folder.with_name(folder.name + ".partial")
    with quiet():
        drafter.save_pretrained(staging)
    if folder.exists():
        shutil.rmtree(folder)
    staging.replace(folder)


def load_drafter(folder: Path, target_path: str | None = None) -> Eagle3DraftModel:
    """Load a checkpoint in fp32, with nothing assumed: every weight it should hold is there, of the right shape and finite.

    Args:
        target_path: where the target is; default what the checkpoint's config says.

    Raises:
        DrafterError: what is wrong with the checkpoint, or that the target can't be read.
    """
    from speculators.models.eagle3 import Eagle3SpeculatorConfig

    with quiet():
        try:
            config = Eagle3SpeculatorConfig.from_pretrained(folder)
            assert isinstance(config, Eagle3SpeculatorConfig)
            weights = read_weights(folder)
        except (OSError, ValueError, NotImplementedError, KeyError) as error:
            raise DrafterError(f"{folder} is not an EAGLE-3 drafter in speculators' format: {error}") from error
    return build_drafter(config, weights, folder, target_path)


def build_drafter(config: Eagle3SpeculatorConfig, weights: dict[str, Tensor], folder: Path, target_path: str | None) -> Eagle3DraftModel:
    """The fp32 drafter of `config` with exactly these weights; what is the target's own is taken from there.

    Args:
        weights: under speculators' names.
        folder: where they are from, for messages.

    Raises:
        DrafterError: a weight is missing, unknown, of a wrong shape or not finite, or the target can't be read.
    """
    from speculators.models.eagle3 import Eagle3DraftModel

    with quiet(), torch.random.fork_rng(devices=[]):
        config.transformer_layer_config._attn_implementation = _ATTENTION
        try:
            drafter = Eagle3DraftModel(config)
        except (ValueError, NotImplementedError, KeyError) as error:
            raise DrafterError(f"{folder} is not an EAGLE-3 drafter in speculators' format: {error}") from error
        _check_weights(weights, drafter.state_dict(), folder)
        drafter.load_state_dict(weights, strict=False)
        verifier = config.speculators_config.verifier
        verifier.name_or_path = verifier.name_or_path if target_path is None else _absolute(target_path)
        try:
            drafter.load_verifier_weights()
        except (OSError, ValueError, RuntimeError) as error:
            raise DrafterError(f"The target {verifier.name_or_path} of the drafter {folder} can't be read: {error}") from error
    drafter.float()
    return drafter


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, from all its .safetensors files."""
    from safetensors.torch import load_file

    shards = sorted(folder.glob("*.safetensors"))
    if not shards:
        raise FileNotFoundError("it holds no .safetensors file")
    return {name: weight for shard in shards for name, weight in load_file(shard).items()}


def _absolute(target: str) -> str:
    """A folder as it is found from anywhere; a hub name as it is."""
    return str(Path(target).resolve()) if Path(target).is_dir() else target


def _check_weights(weights: dict[str, Tensor], expected: dict[str, Tensor], folder: Path) -> None:
    wanted = {name: tuple(weight.shape) for name, weight in expected.items() if name not in _TARGET_OWNED}
    missing = sorted(wanted.keys() - weights.keys())
    unknown = sorted(weights.keys() - wanted.keys())
    if missing or unknown:
        raise DrafterError(f"The drafter {folder} does not match its config.json: missing {missing or 'nothing'}, unknown {unknown or 'nothing'}.")
    for name, shape in wanted.items():
        if tuple(weights[name].shape) != shape:
            raise DrafterError(f"The drafter {folder} has {name} of shape {tuple(weights[name].shape)}, but its config.json says {shape}.")
    _refuse_nan(weights, f"the drafter {folder}")
    if "d2t" in wanted:
        draft_ids = VocabularyMap(weights["d2t"], weights["t2d"]).draft_ids
        if not torch.equal(draft_ids, weights["t2d"].nonzero().squeeze(1)):
            raise DrafterError(f"The drafter {folder} has a d2t and a t2d that disagree; its head would propose other tokens than it was trained for.")


def _refuse_nan(weights: dict[str, Tensor], where: str) -> None:
    broken = [name for name, weight in weights.items() if weight.is_floating_point() and not weight.isfinite().all()]
    if broken:
        raise DrafterError(f"Values that are not finite in {', '.join(broken)} of {where}: it was saved before it was filled, or training diverged.")


@contextmanager
def quiet() -> Iterator[None]:
    """Silence what speculators says of normal cases (one weight file, tied embeddings, a target without a dense MLP) and transformers' progress bars."""
    from loguru import logger
    from transformers.utils import logging

    had_bar = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    logger.disable("speculators")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.enable("speculators")
        if had_bar:
            logging.enable_progress_bar()
