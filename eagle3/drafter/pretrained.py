"""Going on from a drafter that exists, in speculators' form or in that of EAGLE and SpecForge, from a folder or the hub."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3.drafter.eagle_form import ARCHITECTURES, aux_layers_of, load_eagle
from eagle3.drafter.model import load_drafter
from eagle3.errors import DrafterError
from eagle3.store import digest, file_digest
from eagle3.targets import TargetInfo

if TYPE_CHECKING:
    from speculators.models.eagle3 import Eagle3DraftModel

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_FILES = ("*.json", "*.safetensors")


def fetch_drafter(name: str) -> Path:
    """The folder of a drafter: `name` itself, or where the hub's client keeps the repository of that name.

    Raises:
        DrafterError: it is neither, or not a drafter in a form that is known.
    """
    folder = Path(name).expanduser()
    if not folder.exists() and _HUB_NAME.fullmatch(name):
        from huggingface_hub import snapshot_download

        try:
            folder = Path(snapshot_download(name, allow_patterns=[*_FILES]))
        except Exception as error:  # the hub's client raises errors of several libraries
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
            raise DrafterError(
                f"training.init={name} is no folder, and can't be had from the hub ({reason}): check the name, the network and HF_TOKEN."
            ) from None
    if not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
        raise DrafterError(f"training.init={name} holds no config.json with weights in .safetensors: give the folder or hub name of a drafter.")
    if _form(_read_config(folder)) is None:
        raise DrafterError(f"training.init={name} is not an EAGLE-3 drafter: its config.json names neither speculators' eagle3 nor {ARCHITECTURES[0]}.")
    return folder


def drafter_digest(folder: Path) -> str:
    """Hash of a drafter's content: what it is, wherever it lies."""
    return digest({path.name: file_digest(path) for pattern in ("config.json", "*.safetensors") for path in sorted(folder.glob(pattern))})


def aux_layers(folder: Path, target_layers: int) -> list[int]:
    """The target layers whose states the drafter in `folder` reads, as ids of the layers that those states enter."""
    config = _read_config(folder)
    if _form(config) == "eagle":
        return aux_layers_of(config, target_layers)
    layers: list[int] = config["eagle_aux_hidden_state_layer_ids"] or [2, target_layers // 2, target_layers - 3]
    return layers


def load_initial(name: str, target: TargetInfo, captured: Sequence[int], chosen: Mapping[str, Any]) -> Eagle3DraftModel:
    """Load the drafter of `training.init` for `target`, with its own vocabulary map, layers and rope.

    Args:
        captured: the layers whose states there are.
        chosen: settings of its shape that were given beside it; they must be what it has.

    Raises:
        DrafterError: it was made for another target, other layers or another shape, or its files are damaged.
    """
    folder = fetch_drafter(name)
    read = aux_layers(folder, target.num_layers)
    if read != list(captured):
        raise DrafterError(f"training.init={name} reads the target's layers {read}, but those captured are {list(captured)}: set capture.aux_layers={read}.")
    is_eagle = _form(_read_config(folder)) == "eagle"
    drafter = load_eagle(folder, target) if is_eagle else load_drafter(folder, str(target.path))
    layer, config = drafter.config.transformer_layer_config, drafter.config
    has = {"architecture": layer.model_type, "num_layers": layer.num_hidden_layers, "intermediate_size": layer.intermediate_size}
    has |= {key: getattr(config, key) for key in ("draft_vocab_size", "norm_before_residual", "fc_norm", "norm_output")}
    for key, value in chosen.items():
        if has[key] != value:
            raise DrafterError(f"training.{key}={value} can't be had with training.init={name}, which has {has[key]}: leave training.{key} null.")
    return drafter


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise DrafterError(f"{folder / 'config.json'} is not JSON ({error}): the checkpoint is damaged, fetch it again.") from None
    return config


def _form(config: Mapping[str, Any]) -> str | None:
    if config.get("speculators_model_type") == "eagle3":
        return "speculators"
    return "eagle" if set(config.get("architectures") or []) & set(ARCHITECTURES) else None
