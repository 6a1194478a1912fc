"""What all request bodies and their parts have in common: every field is known, or refused by its name."""

import difflib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError
from pydantic_core import PydanticCustomError

from serve.errors import APIError, bad_request


def at_most(count: int) -> BeforeValidator:
    """For an object whose keys are free: validating a million of them would hold up every stream."""

    def few_enough(given: object) -> object:
        if isinstance(given, dict) and len(given) > count:
            raise PydanticCustomError("too_many", f"at most {count} entries are possible")
        return given

    return BeforeValidator(few_enough)


def sort_fields(cls: type["RequestModel"], body: dict[Any, Any], path: str = "") -> dict[str, Any]:
    """The declared fields of a body; unknown and unsupported ones raise APIError.

    Null is left out: clients write it for other servers' fields.
    """
    known = {field.alias or name for name, field in cls.model_fields.items()}
    declared: dict[str, Any] = {}
    for name, value in body.items():
        param = f"{path}{name}"[:200]
        if name in known:
            if value is not None:
                declared[name] = value
        elif name in cls.UNSUPPORTED:
            if value is not None and value not in cls.UNSUPPORTED[name]:
                raise bad_request(
                    f"'{param}' is not supported by this server: {cls.INSTEAD.get(name, 'leave it out')}.",
                    param,
                    "unsupported_parameter",
                )
        elif value is not None and name not in cls.NO_EFFECT:
            close = difflib.get_close_matches(name[:64], sorted(known), n=1, cutoff=0.75)
            hint = f" Did you mean '{path}{close[0]}'?" if close else ""
            raise bad_request(f"Unknown field '{param}'.{hint}", param, "unknown_parameter")
    return declared


class RequestModel(BaseModel):
    """Base of all bodies: JSON types as they are (no "5" for 5), nothing extra, no NaN or infinity."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    NO_EFFECT: ClassVar[frozenset[str]] = frozenset()
    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = {}
    INSTEAD: ClassVar[dict[str, str]] = {}  # what to do in place of an unsupported one

    @classmethod
    def parse(cls, body: object, defaults: Mapping[str, Any] = MappingProxyType({})) -> Self:
        """Validate a decoded JSON body; `defaults` stand for fields that it leaves out. Raises APIError (400)."""
        if not isinstance(body, dict):
            raise bad_request("The request body must be a JSON object.")
        try:
            return cls.model_validate({**defaults, **sort_fields(cls, body)})
        except ValidationError as error:
            raise _first_fault(error) from None


def _first_fault(error: ValidationError) -> APIError:
    fault = error.errors(include_url=False, include_context=False, include_input=False)[0]
    param = ".".join(str(part) for part in fault["loc"])[:200] or None
    if fault["type"] == "missing":
        return bad_request(f"Missing required parameter: '{param}'.", param, "missing_required_parameter")
    message = fault["msg"].removeprefix("Value error, ")
    return bad_request(
        f"Invalid value for '{param}': {message}." if param else f"{message}.", param, "invalid_value"
    )
