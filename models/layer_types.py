"""Which layers have a sliding window, as the config.json files of several families say it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

_TYPES = ("full_attention", "sliding_attention")


def is_whole(value: Any) -> TypeGuard[int]:
    return type(value) is int and value >= 1


def read_sliding_layers(
    config: Mapping[str, Any], architecture: str
) -> tuple[tuple[int, ...], int | None, list[str]]:
    """(layers with the window, window, what is not supported or wrong) of a config.json with its defaults filled in.

    `layer_types` says it for Qwen, Gemma and GPT-OSS. Without it, of Qwen those from `max_window_layers` on where
    `use_sliding_window` is set, of Gemma 3 all but every `sliding_window_pattern`-th, of Gemma 2 and GPT-OSS every other
    one, the first included. As in transformers, all layers of Mistral, Mixtral and Qwen's mixtures of experts slide where
    they have a window, and none of Llama, whatever `layer_types` says; mixed ones are refused.
    Without sliding layers the window is None. With problems the first two mean nothing.
    """
    layers, problems = _layers(config, architecture)
    window = config.get("sliding_window")
    if architecture.startswith("Qwen") and not config.get("use_sliding_window"):
        window = None
    if problems or not layers:
        return (), None, problems
    if not is_whole(window):
        return (), None, [f"sliding layers with sliding_window={window!r}"]
    return layers, window, []


def _layers(config: Mapping[str, Any], architecture: str) -> tuple[tuple[int, ...], list[str]]:
    num_layers = config.get("num_hidden_layers")
    if not is_whole(num_layers):
        return (), []  # what is wrong with it is said elsewhere
    types = config.get("layer_types")
    alike = architecture in ("MistralForCausalLM", "MixtralForCausalLM", "Qwen3MoeForCausalLM")
    mixes = architecture.startswith(("Qwen", "Gemma", "GptOss")) and not alike
    if types is not None:
        layers, problems = _of_types(types, num_layers)
        if mixes or problems:
            return layers, problems
        if 0 < len(layers) < num_layers:
            return (), [f"layers of sliding_attention beside others in {architecture}"]
    if alike and architecture.startswith("Qwen") and not config.get("use_sliding_window"):
        return (), []
    if alike:
        return () if config.get("sliding_window") is None else tuple(range(num_layers)), []
    if architecture.startswith("Gemma3"):
        # Not `_sliding_window_pattern`: files with that have layer types, and transformers does not read it.
        pattern = 6 if config.get("sliding_window_pattern") is None else config["sliding_window_pattern"]
        if not is_whole(pattern):
            return (), [f"sliding_window_pattern={pattern!r}"]
        return tuple(i for i in range(num_layers) if (i + 1) % pattern), []
    if architecture.startswith(("Gemma2", "GptOss")):
        return tuple(range(0, num_layers, 2)), []
    if not config.get("use_sliding_window"):
        return (), []
    if not mixes:
        return (), ["use_sliding_window=true"]
    first = config.get("max_window_layers", 28)
    if first != 0 and not is_whole(first):
        return (), [f"max_window_layers={first!r}"]
    return () if config.get("sliding_window") is None else tuple(range(first, num_layers)), []


def _of_types(types: Any, num_layers: int) -> tuple[tuple[int, ...], list[str]]:
    if not isinstance(types, list):
        return (), [f"layer_types={types!r}"]
    unknown = sorted(set(map(str, types)) - set(_TYPES))
    if unknown:
        return (), [f"layers of {', '.join(unknown)}"]
    if len(types) != num_layers:
        return (), [f"layer_types of {len(types)} layers, num_hidden_layers of {num_layers}"]
    return tuple(i for i, kind in enumerate(types) if kind == "sliding_attention"), []
