"""Shape and constants of a model of the Llama family, as one frozen, hashable value (a static argument of `jax.jit`)."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

from models.expert_fields import MIXTRAL_DEFAULTS, QWEN3_MOE_DEFAULTS, read_experts, with_counts
from models.gemma import (
    GEMMA2,
    GEMMA2_DEFAULTS,
    GEMMA3_ARCHITECTURES,
    GEMMA3_DEFAULTS,
    gemma2_fields,
    gemma3_fields,
    gemma_problems,
    text_part,
)
from models.gpt_oss import GPT_OSS, GPT_OSS_DEFAULTS, gpt_oss_fields, gpt_oss_problems, with_rope
from models.layer_types import is_whole, read_sliding_layers
from models.quantisation import METHODS, read_quantisation
from models.rope_scaling import RopeScaling, is_positive, read_rope, read_sliding_rope

log = logging.getLogger("tangram")

# What transformers takes where the config.json of an architecture says nothing.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"max_position_embeddings": 2048},
    "MistralForCausalLM": {
        "sliding_window": 4096, "num_key_value_heads": 8, "max_position_embeddings": 131_072,
    },
    "Qwen2ForCausalLM": {
        "num_key_value_heads": 32, "max_position_embeddings": 32_768, "sliding_window": 4096,
    },
    "Qwen3ForCausalLM": {
        "num_key_value_heads": 32, "max_position_embeddings": 32_768, "sliding_window": 4096, "head_dim": 128,
    },
    "MixtralForCausalLM": MIXTRAL_DEFAULTS,
    "Qwen3MoeForCausalLM": QWEN3_MOE_DEFAULTS,
    GEMMA2: GEMMA2_DEFAULTS,
    **dict.fromkeys(GEMMA3_ARCHITECTURES, GEMMA3_DEFAULTS),
    GPT_OSS: GPT_OSS_DEFAULTS,
}  # fmt: skip


ARCHITECTURES_OF: dict[str, tuple[str, ...]] = {  # by model_type
    "llama": ("LlamaForCausalLM",),
    "mistral": ("MistralForCausalLM",),
    "mixtral": ("MixtralForCausalLM",),
    "qwen2": ("Qwen2ForCausalLM",),
    "qwen3": ("Qwen3ForCausalLM",),
    "qwen3_moe": ("Qwen3MoeForCausalLM",),
    "gemma2": (GEMMA2,),
    **dict.fromkeys(("gemma3", "gemma3_text"), GEMMA3_ARCHITECTURES),
    "gpt_oss": (GPT_OSS,),
}


class UnsupportedModelError(ValueError):
    """The model cannot be served; the message says why and what is supported."""


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
    qkv_bias: bool = False  # queries, keys and values have a bias (Qwen 2, `attention_bias`)
    attn_out_bias: bool = False  # so has the output projection of attention (`attention_bias`)
    attention_sinks: bool = (
        False  # a learnt logit of each query head joins its softmax, with no value (GPT-OSS)
    )
    qk_norm: bool = False  # queries and keys of each head are RMS-normalised before RoPE (Qwen 3, Gemma 3)
    # A query of one of these layers sees the last `sliding_window` tokens, itself included; of the others every token.
    sliding_window: int | None = None
    sliding_layers: tuple[int, ...] = ()
    sliding_rope_theta: float | None = None  # their RoPE base, never scaled; None: as in the others
    query_scale: float | None = None  # factor on q.k; None: D ** -0.5
    attention_soft_cap: float | None = None  # scores are cap * tanh(score / cap) (Gemma 2)
    logits_soft_cap: float | None = None  # and so are the model's logits
    norm_offset: float = 0.0  # added to the weights of all norms (Gemma: 1)
    post_norms: bool = False  # what attention and MLP give is normalised before it is added (Gemma)
    embed_scale: float = 1.0  # factor on the embeddings, rounded to their dtype (Gemma: E ** 0.5)
    gelu: bool = False  # the MLP's gate is GELU (tanh approximation) instead of SiLU
    # A mixture of experts: X of them in every layer but `dense_layers`, k of which each token goes through.
    num_experts: int = 0  # X; 0: one MLP for all tokens
    experts_per_token: int = 0  # k
    expert_size: int = 0  # hidden width of each
    normalize_experts: bool = True  # the weights of the chosen experts add up to one
    dense_layers: tuple[int, ...] = ()
    experts_mxfp4: bool = (
        False  # the experts' weights are in MXFP4, as `expert_products.mxfp4.pack` gives them
    )
    # The weights of all layers' products are in FP8, as `fp8_products.quantise` gives them; experts in MXFP4 stay so.
    weights_fp8: bool = False
    # With FP8 weights: in steps of many tokens these become FP8 too, each with its own scale.
    activations_fp8: bool = False
    expert_bias: bool = False  # router and experts have biases (GPT-OSS)
    # The experts' gate and up parts are cut off there, g * sigmoid(1.702 g) * (u + 1) instead of silu(g) * u (GPT-OSS).
    swiglu_limit: float | None = None
    # Of one device's share (`models.sharding.share`): the mesh axis over which what its heads and MLPs give is added up.
    tensor_axis: str | None = None
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
        if self.sliding_layers and (self.sliding_window is None or self.sliding_window < 1):
            raise ValueError(f"sliding layers need a window of at least 1, got {self.sliding_window}")
        if self.num_experts and self.gelu:
            raise ValueError("experts whose gate is GELU are not supported, only SiLU")
        if self.swiglu_limit is not None and not (self.num_experts and self.swiglu_limit > 0):
            raise ValueError(f"swiglu_limit needs experts and must be positive, got {self.swiglu_limit}")
        if self.num_experts and not (
            1 <= self.experts_per_token <= self.num_experts and self.expert_size >= 1
        ):
            raise ValueError(
                f"expected 1 to {self.num_experts} experts a token of a size of at least 1, got {self.experts_per_token} "
                f"of size {self.expert_size}"
            )
        for name in ("attention_soft_cap", "logits_soft_cap"):
            cap = getattr(self, name)
            if cap is not None and not cap > 0:
                raise ValueError(f"{name} must be positive or None, got {cap}")
        if list(self.sliding_layers) != sorted(set(self.sliding_layers) & set(range(self.num_layers))):
            raise ValueError(
                f"sliding_layers must be ascending numbers below {self.num_layers}, got {self.sliding_layers}"
            )

    @property
    def group_size(self) -> int:
        """G: query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def attention_scale(self) -> float:
        """Factor on q.k before the softmax."""
        return float(self.head_dim**-0.5) if self.query_scale is None else self.query_scale

    def has_experts(self, layer: int) -> bool:
        """Whether the MLP of a layer is a mixture of experts."""
        return self.num_experts > 0 and layer not in self.dense_layers

    @property
    def full_layers(self) -> tuple[int, ...]:
        """The layers whose queries see every token; only their cache grows with the context, and is compressed."""
        return tuple(i for i in range(self.num_layers) if i not in self.sliding_layers)

    def replace(self, **changes: Any) -> ModelConfig:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)


def architectures_of(config: Mapping[str, Any]) -> list[str]:
    """Those that a config.json names, or without a name there the one that its model_type stands for."""
    named = config.get("architectures")
    if not named:
        return list(ARCHITECTURES_OF.get(str(config.get("model_type")), ())[:1])
    return [str(x) for x in named] if isinstance(named, list) else [str(named)]


def config_from_huggingface(config: Mapping[str, Any], name: str) -> ModelConfig:
    """Translates the contents of a Hugging Face `config.json`.

    Raises UnsupportedModelError, naming every feature that this package lacks, for anything but `ARCHITECTURES`.
    """
    config = text_part(config)
    architectures = architectures_of(config) or ["(none given)"]
    architecture = next((name for name in architectures if name in ARCHITECTURES), "")
    # A window that is null is none; where none makes no sense, null is the family's default.
    given = {key: x for key, x in with_counts(config).items() if x is not None or key not in _NEVER_NULL}
    config = {**ARCHITECTURES.get(architecture, {}), **given}
    if architecture == GPT_OSS:
        config = with_rope(config)
    problems = _unsupported(config, architecture)
    kind = config.get("model_type")
    if architecture and architecture not in ARCHITECTURES_OF.get(str(kind), (architecture,)):
        # Which of them it is cannot be told: the other's window or norms may be meant.
        problems.append(f"{architecture} with model_type {kind!r}")
    if not architecture:
        problems.insert(0, f"architecture {', '.join(architectures)}")
    theta, scaling, wrong = read_rope(config, by_type=architecture in GEMMA3_ARCHITECTURES)
    problems += wrong
    sliding_layers, window, wrong = read_sliding_layers(config, architecture)
    problems += wrong
    experts, wrong = read_experts(config, architecture)
    problems += wrong
    sliding_theta, wrong = read_sliding_rope(config) if sliding_layers else (None, [])
    problems += wrong
    positions: Any = config.get("max_position_embeddings")
    if scaling is not None and is_whole(positions):
        positions = max(positions, scaling.stretched)
    if window is not None and is_whole(positions) and window >= positions and sliding_theta is None:
        sliding_layers, window = (), None  # nothing outgrows it
    reach = None
    if sliding_layers and len(sliding_layers) == config["num_hidden_layers"]:
        if architecture.startswith(_ALL_SLIDING):
            reach, sliding_layers, window = window, (), None  # so far it hides nothing
        else:
            problems.append(
                f"sliding_window={window} in every layer (nothing of the cache would be compressed)"
            )
    if problems:
        raise UnsupportedModelError(
            f"cannot load {name}: {'; '.join(problems)} not supported. Supported: "
            f"{', '.join(ARCHITECTURES)}, without a sliding window in every layer of Gemma or GPT-OSS, soft caps but "
            f"Gemma 2's, biases of MLPs but of GPT-OSS's experts; quantised by {', '.join(METHODS)}, "
            "GPT-OSS by mxfp4, or not at all; rope scaling default, linear, llama3 or yarn"
        )
    _check_numbers(config, name)
    positions = _at_most(reach, positions, name, "a sliding window in every layer")
    num_heads, hidden_size = config["num_attention_heads"], config["hidden_size"]
    biased = bool(config.get("attention_bias")) and not architecture.startswith(_NEVER_BIASED)
    fields: dict[str, Any] = dict(
        name=name,
        vocab_size=config["vocab_size"],
        num_layers=config["num_hidden_layers"],
        hidden_size=hidden_size,
        intermediate_size=config["intermediate_size"],
        num_heads=num_heads,
        num_kv_heads=config.get("num_key_value_heads") or num_heads,
        head_dim=config.get("head_dim") or hidden_size // num_heads,
        max_positions=_at_most(_undivided(config), positions, name, "dual chunk attention"),
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=biased or architecture == "Qwen2ForCausalLM",
        attn_out_bias=biased,
        sliding_window=window,
        sliding_layers=sliding_layers,
        sliding_rope_theta=sliding_theta,
        bos_token_id=_first_token_id(config, f"config.json of {name}"),
        eos_token_ids=end_token_ids(config, f"config.json of {name}"),
        qk_norm=architecture.startswith("Qwen3"),
        **experts,
    )
    if architecture in GEMMA3_ARCHITECTURES:
        fields |= gemma3_fields(hidden_size, float(config["query_pre_attn_scalar"] ** -0.5))
    if architecture == GEMMA2:
        fields |= gemma2_fields(
            hidden_size,
            float(config["query_pre_attn_scalar"] ** -0.5),
            config["attn_logit_softcapping"],
            config["final_logit_softcapping"],
        )
    if architecture == GPT_OSS:
        fields |= gpt_oss_fields(float(config["swiglu_limit"]), config["attention_bias"])
    try:
        return ModelConfig(**fields)
    except ValueError as error:
        raise UnsupportedModelError(f"cannot load {name}: {error}") from error


def _check_numbers(config: Mapping[str, Any], name: str) -> None:
    required = ("vocab_size", "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads")
    missing = [key for key in required if key not in config]
    if missing:
        raise UnsupportedModelError(f"cannot load {name}: config.json lacks {', '.join(missing)}")
    numbers = {key: config.get(key) for key in (*required, *_OPTIONAL_NUMBERS)}
    faults = [
        f"{key} is {value!r}"
        for key, value in numbers.items()
        if (value is None and key in required) or (value is not None and not is_whole(value))
    ]
    eps = config.get("rms_norm_eps", 1e-6)
    if not is_positive(eps):
        faults.append(f"rms_norm_eps is {eps!r}")
    if faults:
        raise UnsupportedModelError(f"cannot load {name}: {', '.join(faults)}: expected positive numbers")


def _unsupported(config: Mapping[str, Any], architecture: str) -> list[str]:
    """What this package lacks, RoPE and windows aside."""
    problems = []
    if not isinstance(config.get("text_config"), Mapping | None):
        problems.append(f"text_config={config['text_config']!r}")
    if config.get("is_causal") is False:
        problems.append("is_causal=false")
    if config.get("mlp_bias"):
        problems.append("mlp_bias=true")
    if architecture in (GEMMA2, *GEMMA3_ARCHITECTURES):
        problems += gemma_problems(config, architecture)
    elif config.get("hidden_act", "silu") not in ("silu", "swish"):  # two names of one function
        problems.append(f"hidden_act={config['hidden_act']}")
    if architecture == GPT_OSS:
        problems += gpt_oss_problems(config)
    else:
        problems += read_quantisation(config.get("quantization_config"))[1]
    return problems


# Released ones have a window in every layer: they are taken as far as it reaches, where attention to all tokens is exact.
_ALL_SLIDING = ("Mistral", "Mixtral", "Qwen")
# As in transformers, whatever their files say; Qwen 2 has biases of queries, keys and values alone.
_NEVER_BIASED = ("Mistral", "Mixtral", "Qwen2")
_OPTIONAL_NUMBERS = ("num_key_value_heads", "head_dim", "max_position_embeddings")
_NEVER_NULL = ("rope_theta", "rope_local_base_freq", "max_position_embeddings")


def _undivided(config: Mapping[str, Any]) -> Any:
    """Positions that Qwen 2.5 1M reaches without its dual chunk attention."""
    divided = config.get("dual_chunk_attention_config")
    return divided.get("original_max_position_embeddings") if isinstance(divided, Mapping) else None


def _at_most(most: Any, positions: int, name: str, lacking: str) -> int:
    """The positions that a model reaches without what this package lacks, if that is a number."""
    if not is_whole(most) or most >= positions:
        return positions
    log.warning("%s: at most %d of %d positions, %s is not supported", name, most, positions, lacking)
    return most


def _first_token_id(config: Mapping[str, Any], where: str) -> int | None:
    """`bos_token_id` of a config; None, or a negative one, for none. Raises UnsupportedModelError."""
    bos = config.get("bos_token_id")
    if bos is None or type(bos) is int:
        return None if bos is None or bos < 0 else bos
    raise UnsupportedModelError(f"{where}: bos_token_id is {bos!r}, expected a token id")


def end_token_ids(config: Mapping[str, Any], where: str) -> tuple[int, ...]:
    """`eos_token_id` of a config, one or several; negative ones and nulls are none. Raises UnsupportedModelError."""
    eos = config.get("eos_token_id")
    ids = [i for i in (eos if isinstance(eos, list) else [eos]) if i is not None]
    if not all(type(i) is int for i in ids):
        raise UnsupportedModelError(
            f"{where}: eos_token_id is {eos!r}, expected a token id or a list of them"
        )
    return tuple(i for i in ids if i >= 0)
