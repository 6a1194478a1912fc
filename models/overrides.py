"""Fields that replace those of a model's config.json, as vLLM's `--hf-overrides`."""

import argparse
import json
from collections.abc import Mapping
from typing import Any

from models.config import architectures_of
from models.gemma import GEMMA3_ARCHITECTURES, text_part
from models.gpt_oss import GPT_OSS, with_rope
from models.rope_scaling import of_layers, rope_fields, sliding_rope_fields


def parse_overrides(text: str) -> dict[str, Any]:
    """A JSON object, for the command line."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"'{text}' is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"'{text}' is not a JSON object: write for example {{\"key\": 1}}")
    return found


def overridden(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json with some of its fields replaced; those of a `text_config` also without writing its name.

    RoPE's are replaced one by one, under either of their names, unless its type changes or goes (null): then only the base
    stays. What is neither an object nor null is left for `config_from_huggingface` to refuse.
    """
    config, overrides = text_part(config), text_part(overrides)
    if GPT_OSS in architectures_of({**config, **overrides}):
        config = with_rope(config)  # which a file may leave to the defaults
    merged = {**config, **overrides}
    rope, sliding = rope_fields(config), sliding_rope_fields(config)
    changed = bool({"rope_theta", "rope_local_base_freq"} & overrides.keys())
    for name in ("rope_parameters", "rope_scaling"):
        if name not in overrides or not isinstance(overrides[name], Mapping | None):
            continue
        changed = True
        given = of_layers(overrides[name], "sliding_attention")
        sliding |= given if isinstance(given, Mapping) else {}
        given = of_layers(overrides[name])
        if given is None and overrides[name] is not None:
            continue  # only of the sliding layers
        changes = dict(given or {"rope_type": "default"})
        kind = changes.pop("type", None)
        changes.setdefault("rope_type", kind or rope.get("rope_type", "default"))
        if changes["rope_type"] != rope.get("rope_type", "default"):
            rope = {"rope_theta": rope.get("rope_theta")}
        rope |= changes
    if not changed:
        return merged
    if "rope_theta" in overrides:
        rope["rope_theta"] = overrides["rope_theta"]
    if sliding and "rope_local_base_freq" in overrides:
        sliding["rope_theta"] = overrides["rope_local_base_freq"]
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(merged.get(name), Mapping | None):
            merged[name] = None
    if isinstance(merged.get("rope_parameters"), Mapping | None):
        by_type = {"full_attention": rope} | ({"sliding_attention": sliding} if sliding else {})
        nested = sliding or set(GEMMA3_ARCHITECTURES) & set(architectures_of(merged))
        merged["rope_parameters"] = by_type if nested else rope
    return merged
