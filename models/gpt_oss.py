"""What GPT-OSS adds to a Llama, and what its config.json files leave to transformers' defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from models.mxfp4 import BLOCK
from models.rope_scaling import is_positive

GPT_OSS = "GptOssForCausalLM"
GPT_OSS_DEFAULTS: dict[str, Any] = {
    "vocab_size": 201_088, "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 36,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5, "rope_theta": 150_000.0, "sliding_window": 128, "attention_bias": True,
    "num_local_experts": 128, "num_experts_per_tok": 4, "swiglu_limit": 7.0,
}  # fmt: skip
_ROPE = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
# Factor in its experts' gate, x * sigmoid(1.702 x), which is near GELU. All released models have it.
_ALPHA = 1.702


def with_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json of GPT-OSS; its RoPE is scaled also where it does not say so."""
    # Of the older field an object with nothing in it says nothing, of the newer one that there is no scaling.
    said = config.get("rope_parameters") is not None or config.get("rope_scaling") not in (None, {})
    return dict(config) if said else {**config, "rope_parameters": _ROPE}


def gpt_oss_problems(config: Mapping[str, Any]) -> list[str]:
    """What of a GPT-OSS is not supported or wrong, layer types, experts' sizes and RoPE aside."""
    problems = []
    if not isinstance(config["attention_bias"], bool):
        problems.append(f"attention_bias={config['attention_bias']!r}")
    if not is_positive(config["swiglu_limit"]):
        problems.append(f"swiglu_limit={config['swiglu_limit']!r}")
    if config.get("swiglu_alpha", _ALPHA) != _ALPHA:
        problems.append(f"swiglu_alpha={config['swiglu_alpha']!r}")
    quantization = config.get("quantization_config")
    if isinstance(quantization, Mapping) and quantization.get("quant_method") == "mxfp4":
        problems += [
            f"mxfp4 with {key}={config[key]!r} (not a multiple of {BLOCK})"
            for key in ("hidden_size", "intermediate_size")
            if isinstance(config[key], int) and config[key] % BLOCK
        ]
    elif quantization:
        problems.append(f"quantised weights other than mxfp4 (quantization_config={quantization!r})")
    return problems


def gpt_oss_fields(swiglu_limit: float = 7.0, attention_bias: bool = True) -> dict[str, Any]:
    """Fields of ModelConfig that every GPT-OSS has, wherever its configuration was read."""
    return {
        "attention_sinks": True,
        "qkv_bias": attention_bias,
        "attn_out_bias": attention_bias,
        "expert_bias": True,
        "swiglu_limit": swiglu_limit,
    }
