"""A JSON schema as a rule of a grammar for `llguidance`."""

import json
from typing import Any

# Formats that llguidance enforces. It refuses others, where JSON Schema has them say nothing of what is valid.
_FORMATS = frozenset(
    ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid", "unknown"]
)
_BY_NAME = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))
_VALUES = frozenset(("const", "enum", "default", "examples"))


def json_rule(schema: dict[str, Any], layout: dict[str, Any]) -> str:
    """The right side of a rule that gives what is valid by a schema; `layout`: llguidance's options of white space.

    Raises ValueError for a number that is none in JSON.
    """
    rule = _enforceable(schema) | {"x-guidance": layout}
    return "%json " + json.dumps(rule, ensure_ascii=False, allow_nan=False)


def _enforceable(schema: Any) -> Any:
    """Without the formats that are notes for the reader."""
    if isinstance(schema, list):
        return [_enforceable(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {}
    for key, value in schema.items():
        if key == "format" and isinstance(value, str) and value not in _FORMATS:
            continue
        if key in _BY_NAME and isinstance(value, dict):
            value = {name: _enforceable(part) for name, part in value.items()}
        elif key not in _VALUES:
            value = _enforceable(value)
        kept[key] = value
    return kept
