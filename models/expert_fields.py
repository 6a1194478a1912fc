"""Which layers are mixtures of experts, and of what size, as the config.json files of several families say it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from models.gpt_oss import GPT_OSS
from models.layer_types import is_whole

# Their defaults in transformers.
QWEN3_MOE_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 4, "max_position_embeddings": 32_768, "sliding_window": 4096, "num_experts": 128,
    "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": False, "decoder_sparse_step": 1,
}  # fmt: skip
MIXTRAL_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 8, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5, "num_local_experts": 8,
    "num_experts_per_tok": 2, "rope_theta": 1e6,
}  # fmt: skip

# The first name is Mixtral's; later versions of transformers write it for all.
_COUNTS = ("num_local_experts", "num_experts")


def with_counts(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json, the number of its experts under both names that there are for it, if it has one of them."""
    said = {config[name] for name in _COUNTS if type(config.get(name)) is int}
    return {**config, **dict.fromkeys(_COUNTS, said.pop())} if len(said) == 1 else dict(config)


def read_experts(config: Mapping[str, Any], architecture: str) -> tuple[dict[str, Any], list[str]]:
    """(fields of ModelConfig, what is wrong) of a config.json with its defaults filled in; no fields without experts."""
    if architecture in ("MixtralForCausalLM", GPT_OSS):
        sizes = {"expert_size": "intermediate_size"}
    elif architecture == "Qwen3MoeForCausalLM":
        sizes = {"expert_size": "moe_intermediate_size"}
    else:
        return {}, []
    named = _COUNTS[0] if config.get(_COUNTS[0]) is not None else _COUNTS[1]
    names = sizes | {"num_experts": named, "experts_per_token": "num_experts_per_tok"}
    wrong = [f"{name}={config.get(name)!r}" for name in names.values() if not is_whole(config.get(name))]
    layers, problems = _dense_layers(config)
    if len({config[name] for name in _COUNTS if type(config.get(name)) is int}) > 1:
        problems.append(" but ".join(f"{name}={config[name]}" for name in _COUNTS))
    if wrong or problems:
        return {}, wrong + problems
    fields: dict[str, Any] = {field: config[name] for field, name in names.items()}
    fields["normalize_experts"] = architecture != "Qwen3MoeForCausalLM" or bool(config["norm_topk_prob"])
    return fields | {"dense_layers": layers}, []


def _dense_layers(config: Mapping[str, Any]) -> tuple[tuple[int, ...], list[str]]:
    """Layers with one MLP for all tokens: those of a list, and all but every so-manieth."""
    num_layers, step = config.get("num_hidden_layers"), config.get("decoder_sparse_step", 1)
    listed = config.get("mlp_only_layers") or []
    if not is_whole(num_layers):
        return (), []  # what is wrong with it is said elsewhere
    if not is_whole(step):
        return (), [f"decoder_sparse_step={step!r}"]
    if not isinstance(listed, list) or not all(type(i) is int for i in listed):
        return (), [f"mlp_only_layers={listed!r}"]
    return tuple(i for i in range(num_layers) if i in listed or (i + 1) % step), []
