"""How RoPE's frequencies are changed for longer contexts, and how a Hugging Face config.json says so."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Mapping
from typing import Any

# Numbers that each type must have, and those that it may have.
_REQUIRED = {
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "linear": ("factor",),
    "yarn": ("factor",),
}
_OPTIONAL = {
    "yarn": (
        "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor", "attn_factor", "mscale",
        "mscale_all_dim",
    ),
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How RoPE's inverse frequencies are changed for contexts longer than the pretrained ones.

    `kind` is "llama3" (Llama 3.1 and later: long wavelengths are divided by `factor`, short ones kept, a linear
    blend between), "yarn" (YaRN, arXiv 2309.00071: the same, blended over the dimensions between those that turn `beta_fast`
    and `beta_slow` times within the original context), "linear" (all divided by `factor`) or "factors" (each divided by its
    entry of `factors`, as GGUF files store llama3). Cosines and sines are multiplied by `attention_factor`.
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
        """YaRN with the paper's attention factor (its equation 22), unless `fields` have one.

        Raises ValueError where it reaches more positions than 32 bits count.
        """
        if factor * original_max_positions >= 2**31:
            raise ValueError(
                f"yarn by {factor:g} of {original_max_positions:g} positions (32 bits count no more than {2**31:g})"
            )
        given = {"attention_factor": yarn_attention_factor(factor)} | fields
        return cls(kind="yarn", factor=factor, original_max_positions=original_max_positions, **given)

    @property
    def stretched(self) -> int:
        """Positions that YaRN reaches, however many the model was trained with; 0 for the other kinds."""
        return int(self.factor * self.original_max_positions) if self.kind == "yarn" else 0


def yarn_attention_factor(factor: float, mscale: float = 1.0) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and type(value) is not bool and 0 < value <= sys.float_info.max


_FULL, _SLIDING = "full_attention", "sliding_attention"


def of_layers(given: Any, kind: str = _FULL) -> Any:
    """The part of rope_parameters for one type of layers: transformers 5 nests them where the types differ.

    What is not nested is for the full layers, as in an older file, whose sliding layers have a field of their own.
    """
    if isinstance(given, Mapping) and (_FULL in given or _SLIDING in given):
        return given.get(kind)
    return given if kind == _FULL else None


def rope_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """RoPE's fields under one name, of the full layers where there are sliding ones.

    transformers 5 writes rope_parameters with the base inside, earlier versions rope_scaling beside it. Where a file has
    both, a user has added the older one, as many model pages say: of the newer one only the base stays,
    unless it has one part for each type of layers.
    """
    fields: dict[str, Any] = {}
    newer, older = config.get("rope_parameters"), config.get("rope_scaling")
    if isinstance(newer, Mapping) and isinstance(older, Mapping) and older and of_layers(newer) is newer:
        newer = {key: newer[key] for key in ("rope_theta",) if key in newer}
    for given in (of_layers(newer), of_layers(older)):
        if isinstance(given, Mapping):
            fields |= given
            if "type" in given and "rope_type" not in given:
                fields["rope_type"] = given["type"]
    if fields.get("rope_theta") is None and config.get("rope_theta") is not None:
        fields["rope_theta"] = config["rope_theta"]
    return fields


def sliding_rope_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """RoPE's fields of the sliding layers; empty where they are those of the full ones."""
    fields: dict[str, Any] = {}
    for name in ("rope_parameters", "rope_scaling"):
        given = of_layers(config.get(name), _SLIDING)
        if isinstance(given, Mapping):
            fields |= given
    if fields.get("rope_theta") is None and config.get("rope_local_base_freq") is not None:
        fields["rope_theta"] = config["rope_local_base_freq"]
    return fields


def read_sliding_rope(config: Mapping[str, Any]) -> tuple[float | None, list[str]]:
    """(base of the sliding layers, None: as the others; what is not supported or wrong). They are never scaled."""
    rope = sliding_rope_fields(config)
    if not rope:
        return None, []
    kind, theta = rope.get("rope_type", rope.get("type", "default")), rope.get("rope_theta", 10000.0)
    problems = [] if kind == "default" else [f"rope scaling of type {kind!r} in sliding layers"]
    if not is_positive(theta) or theta <= 1:
        problems.append(f"rope_theta={theta!r} in sliding layers")
    return (None if problems else float(theta)), problems


def read_rope(
    config: Mapping[str, Any], *, by_type: bool = False
) -> tuple[float, RopeScaling | None, list[str]]:
    """(base, scaling, what is not supported or wrong) of a config.json; with problems the first two mean nothing.

    `by_type`: the model has a RoPE for each type of layers (Gemma 3), whichever way the file says it.
    """
    problems = [
        f"{name}={config[name]!r}"
        for name in ("rope_parameters", "rope_scaling")
        if not all(
            isinstance(x, Mapping | None)
            for x in (config.get(name), *(of_layers(config.get(name), k) for k in (_FULL, _SLIDING)))
        )
    ]
    rope = rope_fields(config)
    kind = rope.get("rope_type", rope.get("type", "default"))
    theta = 10000.0 if rope.get("rope_theta") is None else rope["rope_theta"]
    if not is_positive(theta) or theta <= 1:
        problems.append(f"rope_theta={theta!r}")
    for name, neutral in (("partial_rotary_factor", 1), ("llama_4_scaling_beta", 0)):
        problems += [f"{name}={x[name]!r}" for x in (config, rope) if x.get(name) not in (None, neutral)]
    if kind not in ("default", *_REQUIRED):
        return 0.0, None, [*problems, f"rope scaling of type {kind!r}"]
    if kind == "default":
        return (0.0 if problems else float(theta)), None, problems
    # As transformers, the number of a config.json itself comes first, or says nothing of one RoPE of several.
    of_all = None if by_type else config.get("original_max_position_embeddings")
    original = of_all or rope.get("original_max_position_embeddings")
    if original is None and kind == "yarn":
        original = config.get("max_position_embeddings")
    rope = rope | {"original_max_position_embeddings": original}
    if kind == "yarn":
        rope = _with_factor(rope, config.get("max_position_embeddings"))
    absent = [key for key in _REQUIRED[kind] if rope.get(key) is None]
    if absent:
        problems.append(f"rope scaling of type {kind!r} without {', '.join(absent)}")
    problems += [
        f"rope scaling with {key}={rope[key]!r}"
        for key in (*_REQUIRED[kind], *_OPTIONAL.get(kind, ()))
        if rope.get(key) is not None and not is_positive(rope[key])
    ]
    if kind == "llama3" and not problems and rope["high_freq_factor"] < rope["low_freq_factor"]:
        problems.append("high_freq_factor of rope scaling below low_freq_factor")
    if kind == "yarn" and (
        rope.get("extrapolation_factor", 1) != 1 or rope.get("apply_yarn_scaling") is False
    ):
        problems.append("yarn with extrapolation_factor or without apply_yarn_scaling")
    if problems:
        return 0.0, None, problems
    if kind == "yarn":
        try:
            return float(theta), _yarn(rope), []
        except ValueError as error:
            return 0.0, None, [str(error)]
    given: dict[str, Any] = {
        key: float(rope[key]) for key in _REQUIRED[kind] if key != "original_max_position_embeddings"
    }
    if kind == "llama3":
        given["original_max_positions"] = int(rope["original_max_position_embeddings"])
    return float(theta), RopeScaling(kind=kind, **given), []


def _with_factor(rope: dict[str, Any], positions: Any) -> dict[str, Any]:
    """YaRN's fields. As in transformers a factor that is null follows from the positions, one that is not there does not."""
    original = rope["original_max_position_embeddings"]
    if rope.get("factor", 1) is not None or not (is_positive(positions) and is_positive(original)):
        return rope
    return rope | {"factor": positions / original}


def _yarn(rope: Mapping[str, Any]) -> RopeScaling:
    """As transformers reads it, but for `attn_factor`, which multiplies the attention factor as in vLLM and SGLang.

    DeepSeek-R1-0528-Qwen3-8B has it (0.878, which undoes YaRN's factor for 4); transformers ignores it with a warning.
    """
    factor = float(rope["factor"])
    given: dict[str, Any] = {key: float(rope[key]) for key in ("beta_fast", "beta_slow") if rope.get(key)}
    attention_factor = rope.get("attention_factor")
    if attention_factor is None:
        attention_factor = yarn_attention_factor(factor)
        if rope.get("mscale") and rope.get("mscale_all_dim"):  # DeepSeek
            above, below = (yarn_attention_factor(factor, rope[key]) for key in ("mscale", "mscale_all_dim"))
            attention_factor = above / below
        attention_factor *= rope.get("attn_factor") or 1.0
    return RopeScaling.yarn(
        factor,
        int(rope["original_max_position_embeddings"]),
        truncate=bool(rope.get("truncate", True)),
        attention_factor=float(attention_factor),
        **given,
    )
