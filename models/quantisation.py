"""How the weights of a checkpoint are quantised, as the `quantization_config` of its config.json says it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from models.layer_types import is_whole

# Rows and columns of a matrix [out, in] that share a scale; None: all of them.
Block = tuple[int | None, int | None]
WHOLE, CHANNELS = (None, None), (1, None)

PACKED_BITS = (2, 4, 8)  # that divide a word
# Of compressed-tensors. The first three differ in name only: what is stored says whether it is a float.
_PLAIN = ("float-quantized", "int-quantized", "naive-quantized")
_PACKED = "pack-quantized"
_MORE = ("transform_config", "sparsity_config")  # rotations and sparsity: more than other dtypes
METHODS = (
    "fp8",
    f"compressed-tensors ({', '.join(_PLAIN)} or {_PACKED})",
    "awq (gemm, 4 bits)",
    "gptq (2, 4 or 8 bits)",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quantisation:
    """What `quantised.DequantisedTensors` needs to know beside the tensors themselves."""

    method: str
    blocks: tuple[Block, ...] = ()  # that occur
    bits: tuple[int, ...] = ()  # of packed weights, in the order in which to try them
    group_size: int | None = None  # of gptq, whose tensors do not always say it; None: all inputs
    zeros_less_one: bool = False  # gptq's zero points are stored less one


def read_quantisation(given: Any) -> tuple[Quantisation | None, list[str]]:
    """(what a `quantization_config` says, what of it is not supported); neither where there is none."""
    if not given:
        return None, []
    if not isinstance(given, Mapping):
        return None, [f"quantised weights (quantization_config={given!r})"]
    method = given.get("quant_method")
    reader = _READERS.get(method) if isinstance(method, str) else None
    if reader is None:
        named = f"by {method}" if method else f"without quant_method (quantization_config={dict(given)!r})"
        return None, [f"quantised weights {named}"]
    found, problems = reader(given)
    return (None, [f"{method} with {problem}" for problem in problems]) if problems else (found, [])


def _fp8(given: Mapping[str, Any]) -> tuple[Quantisation, list[str]]:
    block, problems = _block(given.get("weight_block_size"), "weight_block_size")
    return Quantisation(method="fp8", blocks=(*block, CHANNELS, WHOLE)), problems


def _awq(given: Mapping[str, Any]) -> tuple[Quantisation, list[str]]:
    wanted = {"bits": 4, "version": "gemm", "zero_point": True}
    return Quantisation(method="awq", bits=(4,)), _unlike(given, wanted)


def _gptq(given: Mapping[str, Any]) -> tuple[Quantisation, list[str]]:
    problems = _unlike(given, {"pack_dtype": "int32", "is_marlin_format": False})
    size, bits = given.get("group_size", -1), given.get("bits")
    form = given.get("checkpoint_format") or given.get("format") or "gptq"
    if not (size == -1 or is_whole(size)):
        problems.append(f"group_size={size!r}")
    if not is_whole(bits) or bits not in PACKED_BITS:
        problems.append(f"bits={bits!r}")
    if form not in ("gptq", "gptq_v2"):
        problems.append(f"checkpoint_format={form!r}")
    # `dynamic` gives some modules other bits: which ones is seen from shapes.
    bits = tuple(dict.fromkeys((bits, *PACKED_BITS))) if given.get("dynamic") else (bits,)
    found = Quantisation(
        method="gptq",
        bits=bits,
        group_size=None if size == -1 else size,
        zeros_less_one=form == "gptq",
    )
    return found, problems


def _compressed_tensors(given: Mapping[str, Any]) -> tuple[Quantisation, list[str]]:
    problems = [f"a {name}" for name in _MORE if not _is_empty(given.get(name))]
    groups = given.get("config_groups")
    if not isinstance(groups, Mapping) or not all(isinstance(group, Mapping) for group in groups.values()):
        return Quantisation(method=""), [*problems, f"config_groups={groups!r}"]
    blocks: dict[Block, None] = {}
    bits: dict[int, None] = {}
    for group in groups.values():
        weights = group.get("weights")
        if weights is None:
            continue  # of activations, or keys and values
        of_group, wrong = _scheme(weights, group.get("format") or given.get("format"))
        blocks |= dict.fromkeys(of_group)
        bits |= {} if wrong or not is_whole(weights.get("num_bits")) else {weights["num_bits"]: None}
        problems += wrong
    found = Quantisation(method="compressed-tensors", blocks=tuple(blocks), bits=tuple(bits))
    return found, list(dict.fromkeys(problems))


def _scheme(weights: Any, form: Any) -> tuple[tuple[Block, ...], list[str]]:
    """(blocks of a group's weights, what is wrong with them)"""
    if not isinstance(weights, Mapping):
        return (), [f"weights={weights!r}"]
    bits, kind, strategy = (weights.get(name) for name in ("num_bits", "type", "strategy"))
    if form == "dense":
        return (), []
    if form not in (*_PLAIN, _PACKED):
        return (), [f"format={form!r}"]
    if form == _PACKED and (kind not in (None, "int") or not is_whole(bits) or bits not in PACKED_BITS):
        return (), [f"{bits!r} bits of type {kind!r} in {_PACKED}"]
    size = weights.get("group_size")
    if strategy is None:  # as compressed-tensors infers it
        strategy = "tensor" if size is None else "channel" if size == -1 else "group"
    if strategy == "tensor":
        return (WHOLE,), []
    if strategy == "channel":
        return (CHANNELS,), []
    if strategy == "group":
        return ((1, size),), ([] if is_whole(size) else [f"group_size={size!r}"])
    if strategy == "block":
        return _block(weights.get("block_structure"), "block_structure", optional=False)
    return (), [f"strategy={strategy!r}"]


_READERS = {"fp8": _fp8, "awq": _awq, "gptq": _gptq, "compressed-tensors": _compressed_tensors}


def _block(given: Any, name: str, optional: bool = True) -> tuple[tuple[Block, ...], list[str]]:
    if given is None and optional:
        return (), []
    if isinstance(given, list | tuple) and len(given) == 2 and all(is_whole(x) for x in given):
        return ((given[0], given[1]),), []
    return (), [f"{name}={given!r}"]


def _unlike(given: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """Fields that are there and other than wanted, whatever their case."""
    found = {key: given[key] for key in wanted if given.get(key) is not None}
    lower = {key: x.lower() if isinstance(x, str) else x for key, x in found.items()}
    return [f"{key}={x!r}" for key, x in found.items() if lower[key] != wanted[key]]


def _is_empty(config: Any) -> bool:
    """Whether a transform_config or sparsity_config is none, or one that compressed-tensors writes for none."""
    if not isinstance(config, Mapping):
        return not config
    return not config or config.get("config_groups") == {} or config.get("format") == "dense"
