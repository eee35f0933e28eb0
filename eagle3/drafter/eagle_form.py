"""The form of EAGLE and SpecForge, which SGLang serves: one llama layer `midlayer.*`, `LlamaForCausalLMEagle3` in config.json, no embeddings of its own.

speculators' own converter is not used: it drops the auxiliary layers, keeps random weights where some are missing, and leaves the embeddings unfilled. Layer
ids mean the layer that a state *enters* here, in vLLM and in speculators; a list that starts with 1 is of the other convention, the layer that a state *leaves*
(sgl-project/sglang#25454 tells them apart in the same way).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from eagle3.drafter.model import build_drafter, quiet, read_weights
from eagle3.errors import DrafterError
from eagle3.store import write_json
from eagle3.targets import TargetInfo

if TYPE_CHECKING:
    from speculators.models.eagle3 import Eagle3DraftModel

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
# What SGLang's layer does not do, and vLLM and speculators do.
_EXTENSIONS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_KEPT = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "attention_bias", "mlp_bias"),
    *("max_position_embeddings", "initializer_range", "vocab_size", "bos_token_id", "eos_token_id", "pad_token_id"),
)


def aux_layers_of(config: Mapping[str, Any], target_layers: int) -> list[int]:
    """The layers whose entering states the drafter reads; those that servers take by default if its config names none."""
    eagle = config.get("eagle_config") or {}
    layers = eagle.get("eagle_aux_hidden_state_layer_ids") or config.get("eagle_aux_hidden_state_layer_ids")
    if not layers:
        return [2, target_layers // 2, target_layers - 3]
    return [layer + 1 for layer in layers] if layers[0] == 1 else list(layers)


def load_eagle(folder: Path, target: TargetInfo) -> Eagle3DraftModel:
    """Load a checkpoint in EAGLE form in fp32, with its own vocabulary map, auxiliary layers and rope, and the target's embeddings if it has none.

    Raises:
        DrafterError: what is wrong with it, or that it does not fit the target.
    """
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import LlamaConfig

    raw: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    weights = {name.replace("midlayer.", "layers.0.", 1): weight for name, weight in read_weights(folder).items()}
    target_vocab = len(weights["t2d"]) if "t2d" in weights else raw.get("vocab_size")
    if (target_vocab, raw.get("hidden_size")) != (target.vocab_size, target.hidden_size):
        raise DrafterError(
            f"The drafter {folder} was made for a target of {target_vocab} tokens and hidden size {raw.get('hidden_size')}, "
            f"but {target.path} has {target.vocab_size} and {target.hidden_size}: choose a drafter of this target."
        )
    own = {key: raw[key] for key in (*_KEPT, "rope_theta", "rope_scaling", "rope_parameters") if raw.get(key) is not None}
    eagle = raw.get("eagle_config") or {}
    extensions: dict[str, Any] = {key: bool(raw.get(key, eagle.get(key, False))) for key in _EXTENSIONS}
    with quiet():
        config = Eagle3SpeculatorConfig(
            transformer_layer_config=LlamaConfig(**own | {"vocab_size": target_vocab, "num_hidden_layers": 1, "tie_word_embeddings": False}),
            draft_vocab_size=raw.get("draft_vocab_size") or len(weights.get("d2t", range(target.vocab_size))),
            eagle_aux_hidden_state_layer_ids=aux_layers_of(raw, target.num_layers),
            speculators_config=SpeculatorsConfig(
                algorithm="eagle3",
                proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=3)],
                default_proposal_method="greedy",
                verifier=VerifierConfig.from_pretrained(str(target.path.resolve())),
            ),
            **extensions,
        )
        if "embed_tokens.weight" not in weights:
            weights["embed_tokens.weight"] = _target_embeddings(target.path)
    return build_drafter(config, weights, folder, None)


def export_eagle(drafter: Eagle3DraftModel, folder: Path) -> None:
    """Write a drafter in EAGLE form to a new folder. Its embeddings are left out: a server in this form takes the target's.

    Raises:
        DrafterError: it has what this form can't say, or the folder is there.
    """
    from safetensors.torch import save_file

    layer, config = drafter.config.transformer_layer_config, drafter.config
    layers = list(config.eagle_aux_hidden_state_layer_ids or ())
    target = Path(str(config.speculators_config.verifier.name_or_path))
    unsaid = [f"training.{key}=true" for key in _EXTENSIONS if getattr(config, key)]
    unsaid += [] if layer.model_type == "llama" and layer.num_hidden_layers == 1 else [f"{layer.num_hidden_layers} {layer.model_type} layers"]
    unsaid += [f"auxiliary layers {layers} (1 as the first one is read as 2)"] if layers[:1] == [1] else []
    unsaid += [] if torch.equal(drafter.embed_tokens.weight.cpu(), _target_embeddings(target).float()) else ["trained embeddings"]
    if unsaid:
        raise DrafterError(f"A drafter with {' and '.join(unsaid)} can't be written in EAGLE form, which has one plain llama layer; serve it with vLLM.")
    if folder.exists():
        raise DrafterError(f"{folder} is there already: give a new folder to export to.")
    folder.mkdir(parents=True)
    weights = {name.replace("layers.0.", "midlayer.", 1): weight.contiguous() for name, weight in drafter.state_dict().items()}
    left_out = {"embed_tokens.weight", "verifier_norm.weight", "verifier_lm_head.weight"}
    save_file({name: weight for name, weight in weights.items() if name not in left_out}, folder / "model.safetensors", metadata={"format": "pt"})
    rope = dict(layer.rope_parameters)
    write_json(
        folder / "config.json",
        {key: getattr(layer, key) for key in _KEPT}
        | {"architectures": [ARCHITECTURES[0]], "model_type": "llama", "num_hidden_layers": 1, "tie_word_embeddings": False, "torch_dtype": "bfloat16"}
        | {"rope_theta": rope.pop("rope_theta"), "rope_scaling": None if rope["rope_type"] == "default" else rope}
        | {"draft_vocab_size": config.draft_vocab_size, "eagle_config": {"eagle_aux_hidden_state_layer_ids": layers, "use_aux_hidden_state": True}},
    )


def _target_embeddings(target: Path) -> torch.Tensor:
    from speculators.utils.loading import load_model_layers

    try:
        with quiet():
            embeddings: torch.Tensor = load_model_layers(["embed_tokens.weight"], str(target))["embed_tokens.weight"]
    except (OSError, ValueError, KeyError) as error:
        raise DrafterError(f"The embeddings of the target {target} can't be read: {error}") from error
    return embeddings
