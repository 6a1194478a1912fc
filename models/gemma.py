"""What Gemma 2 and 3 add to a Llama, and what their config.json files leave to transformers' defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from models.rope_scaling import is_positive, of_layers

GEMMA2 = "Gemma2ForCausalLM"
GEMMA2_DEFAULTS: dict[str, Any] = {
    "vocab_size": 256_000, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 8192,
    "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256, "sliding_window": 4096,
    "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "tie_word_embeddings": True,
    "bos_token_id": 2, "eos_token_id": 1,
}  # fmt: skip
# The second one also reads images; its text model, which is all that is loaded here, is the same.
GEMMA3_ARCHITECTURES = ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration")
# What transformers takes where the file says nothing: those of 4B to 27B say little.
GEMMA3_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131_072,
    "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256, "sliding_window": 4096,
    "rope_theta": 1e6, "rope_local_base_freq": 1e4, "tie_word_embeddings": True,
    "bos_token_id": 2, "eos_token_id": 1,
}  # fmt: skip
_OF_THE_WHOLE = ("architectures", "model_type", "eos_token_id", "tie_word_embeddings", "quantization_config")


def text_part(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of a model of text and images with its `text_config` moved up; any other one as it is.

    What describes the whole model stays (architecture and type, end tokens, whether the head is tied, how it is quantised).
    """
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        return dict(config)
    merged = {key: value for key, value in config.items() if key != "text_config"} | dict(text)
    return merged | {key: config[key] for key in _OF_THE_WHOLE if config.get(key) is not None}


def gemma_problems(config: Mapping[str, Any], architecture: str) -> list[str]:
    """What of a Gemma 2 or 3 is not supported or wrong, layer types and RoPE aside. Only Gemma 2 has soft caps."""
    problems = [
        f"{key}={config[key]!r}"
        for key in ("attn_logit_softcapping", "final_logit_softcapping")
        if config.get(key) is not None and not (architecture == GEMMA2 and is_positive(config[key]))
    ]
    if config.get("use_bidirectional_attention"):
        problems.append(f"use_bidirectional_attention={config['use_bidirectional_attention']!r}")
    if config["hidden_activation"] != "gelu_pytorch_tanh":
        problems.append(f"hidden_activation={config['hidden_activation']}")
    rope = config.get("rope_parameters")
    if (
        architecture in GEMMA3_ARCHITECTURES
        and isinstance(rope, Mapping)
        and rope
        and of_layers(rope) is rope
    ):
        # transformers reads none of it, and takes its defaults.
        problems.append(
            f'rope_parameters={dict(rope)!r} without types of layers (write {{"full_attention": {{...}}, '
            '"sliding_attention": {...}})'
        )
    if not is_positive(config["query_pre_attn_scalar"]):
        problems.append(f"query_pre_attn_scalar={config['query_pre_attn_scalar']!r}")
    return problems


def gemma3_fields(hidden_size: int, query_scale: float) -> dict[str, Any]:
    """Fields of ModelConfig that every Gemma 3 has, wherever its configuration was read."""
    return {
        "qk_norm": True,
        "query_scale": query_scale,
        "norm_offset": 1.0,
        "post_norms": True,
        "embed_scale": float(hidden_size**0.5),
        "gelu": True,
    }


def gemma2_fields(
    hidden_size: int, query_scale: float, attention_soft_cap: float | None, logits_soft_cap: float | None
) -> dict[str, Any]:
    """Fields of ModelConfig that every Gemma 2 has, wherever its configuration was read."""
    return gemma3_fields(hidden_size, query_scale) | {
        "qk_norm": False,
        "attention_soft_cap": None if attention_soft_cap is None else float(attention_soft_cap),
        "logits_soft_cap": None if logits_soft_cap is None else float(logits_soft_cap),
    }
