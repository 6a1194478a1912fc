"""Shape and constants of a model of the Llama family, as one frozen, hashable value (a static argument of `jax.jit`)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

# What transformers takes where the config.json of an architecture says nothing.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {
        "sliding_window": 4096, "num_key_value_heads": 8, "max_position_embeddings": 131_072,
    },
    "Qwen2ForCausalLM": {"num_key_value_heads": 32, "max_position_embeddings": 32_768},
    "Qwen3ForCausalLM": {"num_key_value_heads": 32, "max_position_embeddings": 32_768, "head_dim": 128},
}  # fmt: skip


class UnsupportedModelError(ValueError):
    """The model cannot be served; the message says why and what is supported."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How RoPE's inverse frequencies are changed for contexts longer than the pretrained ones.

    `kind` is "llama3" (Llama 3.1 and later: long wavelengths are divided by `factor`, short ones kept, a linear
    blend between), "yarn" (YaRN, arXiv 2309.00071: the same, blended over the dimensions between those that turn `beta_fast`
    and `beta_slow` times within the original context), "linear" (all divided by `factor`) or "factors" (each divided by its
    entry of `factors`, which is how GGUF files store any of them). Cosines and sines are multiplied by `attention_factor`.
    """

    kind: str
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192
    factors: tuple[float, ...] = ()
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True  # the blend begins and ends at whole dimensions
    attention_factor: float = 1.0

    @classmethod
    def yarn(cls, factor: float, original_max_positions: int, **fields: Any) -> RopeScaling:
        """YaRN with the paper's attention factor (its equation 22), unless `fields` have one."""
        attention_factor = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
        given = {"attention_factor": attention_factor} | fields
        return cls(kind="yarn", factor=factor, original_max_positions=original_max_positions, **given)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Everything about the architecture that is not a weight.

    `num_heads` is N, `num_kv_heads` K, `head_dim` D, `hidden_size` E, `vocab_size` V, `num_layers` L.
    Query head n belongs to KV head n // G.
    """

    name: str
    vocab_size: int
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    qkv_bias: bool = False  # queries, keys and values have a bias (Qwen 2)
    qk_norm: bool = False  # queries and keys of each head are RMS-normalised before RoPE (Qwen 3)
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for field in (
            "vocab_size",
            "num_layers",
            "hidden_size",
            "intermediate_size",
            "num_heads",
            "num_kv_heads",
        ):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} must be at least 1, got {getattr(self, field)}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads must be a multiple of num_kv_heads, got {self.num_heads} and {self.num_kv_heads}"
            )
        if self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(f"head_dim must be even for RoPE, got {self.head_dim}")

    @property
    def group_size(self) -> int:
        """G: query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def attention_scale(self) -> float:
        """Factor on q.k before the softmax."""
        return float(self.head_dim**-0.5)

    def replace(self, **changes: Any) -> ModelConfig:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)


def config_from_huggingface(config: Mapping[str, Any], name: str) -> ModelConfig:
    """Translates the contents of a Hugging Face `config.json`.

    Raises UnsupportedModelError, naming every feature that this package lacks, for anything but `ARCHITECTURES`.
    """
    architectures = config.get("architectures") or ["(none given)"]
    architecture = next((name for name in architectures if name in ARCHITECTURES), "")
    config = {**ARCHITECTURES.get(architecture, {}), **config}
    problems = []
    if not architecture:
        problems.append(f"architecture {', '.join(architectures)}")
    window = config.get("sliding_window") if architecture == "MistralForCausalLM" else None
    if window is not None and window < config["max_position_embeddings"]:
        problems.append(f"sliding_window={window}")
    if config.get("use_sliding_window"):
        problems.append("use_sliding_window=true")
    if other := set(config.get("layer_types") or ()) - {"full_attention"}:
        problems.append(f"layers of {', '.join(sorted(other))}")
    for flag in ("attention_bias", "mlp_bias"):
        if config.get(flag):
            problems.append(f"{flag}=true")
    if config.get("hidden_act", "silu") != "silu":
        problems.append(f"hidden_act={config['hidden_act']}")
    if config.get("quantization_config"):
        problems.append("quantised weights (quantization_config)")
    # transformers 5 writes "rope_parameters" (theta inside); earlier versions "rope_theta" and "rope_scaling".
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    scaling: RopeScaling | None = None
    kind = rope.get("rope_type", rope.get("type", "default"))
    numbers: dict[str, tuple[str, ...]] = {
        "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
        "linear": ("factor",),
        "yarn": ("factor",),
    }
    if absent := [key for key in numbers.get(str(kind), ()) if rope.get(key) is None]:
        problems.append(f"rope scaling of type {kind!r} without {', '.join(absent)}")
    elif wrong := [key for key in numbers.get(str(kind), ()) if not _is_positive(rope[key])]:
        problems += [f"rope scaling with {key}={rope[key]!r}" for key in wrong]
    elif kind == "llama3":
        scaling = RopeScaling(
            kind=kind,
            factor=float(rope["factor"]),
            low_freq_factor=float(rope["low_freq_factor"]),
            high_freq_factor=float(rope["high_freq_factor"]),
            original_max_positions=int(rope["original_max_position_embeddings"]),
        )
    elif kind == "linear":
        scaling = RopeScaling(kind=kind, factor=float(rope["factor"]))
    elif kind == "yarn":
        scaling = _yarn(rope, config)
    elif kind != "default":
        problems.append(f"rope scaling of type {kind!r}")
    if problems:
        raise UnsupportedModelError(
            f"cannot load {name}: {'; '.join(problems)} not supported. Supported: "
            f"{', '.join(ARCHITECTURES)}, without sliding window, other biases than Qwen 2's or quantisation; "
            "rope scaling default, linear, llama3 or yarn"
        )
    required = ("vocab_size", "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads")
    missing = [key for key in required if key not in config]
    if missing:
        raise UnsupportedModelError(f"cannot load {name}: config.json lacks {', '.join(missing)}")
    num_heads = int(config["num_attention_heads"])
    return ModelConfig(
        name=name,
        vocab_size=int(config["vocab_size"]),
        num_layers=int(config["num_hidden_layers"]),
        hidden_size=int(config["hidden_size"]),
        intermediate_size=int(config["intermediate_size"]),
        num_heads=num_heads,
        num_kv_heads=int(config.get("num_key_value_heads") or num_heads),
        head_dim=int(config.get("head_dim") or config["hidden_size"] // num_heads),
        max_positions=max(int(config.get("max_position_embeddings", 2048)), _stretched(scaling)),
        rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
        rope_scaling=scaling,
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=architecture == "Qwen2ForCausalLM",
        qk_norm=architecture == "Qwen3ForCausalLM",
        bos_token_id=config.get("bos_token_id"),
        eos_token_ids=end_token_ids(config, f"config.json of {name}"),
    )


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and 0 < value < math.inf


def _yarn(rope: Mapping[str, Any], config: Mapping[str, Any]) -> RopeScaling:
    """As transformers reads it; with `mscale` and `mscale_all_dim` (DeepSeek) the attention factor is their ratio."""
    factor = float(rope["factor"])
    given: dict[str, Any] = {key: float(rope[key]) for key in ("beta_fast", "beta_slow") if rope.get(key)}
    if rope.get("attention_factor") is not None:
        given["attention_factor"] = float(rope["attention_factor"])
    elif rope.get("mscale") and rope.get("mscale_all_dim"):
        above, below = (
            0.1 * float(rope[key]) * math.log(max(factor, 1.0)) + 1.0 for key in ("mscale", "mscale_all_dim")
        )
        given["attention_factor"] = above / below
    original = rope.get("original_max_position_embeddings") or config.get("max_position_embeddings", 2048)
    return RopeScaling.yarn(factor, int(original), truncate=bool(rope.get("truncate", True)), **given)


def _stretched(scaling: RopeScaling | None) -> int:
    """Positions that YaRN reaches: a config.json may still say how many the model was trained with."""
    return int(scaling.factor * scaling.original_max_positions) if scaling and scaling.kind == "yarn" else 0


def end_token_ids(config: Mapping[str, Any], where: str) -> tuple[int, ...]:
    """`eos_token_id` of a config, one or several; negative ones stand for none. Raises UnsupportedModelError."""
    eos = config.get("eos_token_id")
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if not all(type(i) is int for i in ids):
        raise UnsupportedModelError(
            f"{where}: eos_token_id is {eos!r}, expected a token id or a list of them"
        )
    return tuple(i for i in ids if i >= 0)
