"""Fields that replace those of a model's config.json, as vLLM's `--hf-overrides`."""

import argparse
import json
from collections.abc import Mapping
from typing import Any


def parse_overrides(text: str) -> dict[str, Any]:
    """A JSON object, for the command line."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"'{text}' is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"'{text}' is not a JSON object: write for example {{\"key\": 1}}")
    return found


def overridden(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json with some of its fields replaced; those of RoPE one by one, under either of their names."""
    merged = {**config, **overrides}
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    for name in ("rope_scaling", "rope_parameters"):
        changes = overrides.get(name)
        if isinstance(changes, Mapping):
            rope |= changes
            # The older name of the kind must not lose against the newer one of the file.
            rope |= {"rope_type": changes["type"]} if "type" in changes and "rope_type" not in changes else {}
            merged["rope_parameters"] = rope
    return merged
