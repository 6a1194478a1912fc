"""The tools of a request: the functions that a model may call, and whether it may, must or must not."""

import json
import re
from typing import Any, Literal, Self

from pydantic import Field, PrivateAttr, field_validator, model_validator
from pydantic_core import PydanticCustomError

from serve.errors import bad_request
from serve.fields import RequestModel, sort_fields
from serve.structured import MAX_GRAMMAR

MAX_TOOLS = 128
_NO_PARAMETERS = {"type": "object", "properties": {}}
_CHOICES = ("none", "auto", "required")


class Function(RequestModel):
    """What a model may call. `parameters` is the JSON schema of an object."""

    NO_EFFECT = frozenset(["cache_control"])  # Anthropic's, which clients for many servers write
    UNSUPPORTED = {  # noqa: RUF012 - a ClassVar in RequestModel
        "defer_loading": (False,),
        "allowed_callers": (["direct"],),
        "output_schema": (),
    }

    name: str
    description: str | None = None
    parameters: dict[str, Any] = Field(default_factory=lambda: dict(_NO_PARAMETERS))
    strict: bool = Field(default=False, exclude=True)  # of the API, not of what the model is told

    @model_validator(mode="before")
    @classmethod
    def _known_fields(cls, function: object) -> object:
        if not isinstance(function, dict):
            raise PydanticCustomError("function", "give an object with a 'name'")
        return sort_fields(cls, function, "tools[].function.")

    @field_validator("name")
    @classmethod
    def _plain_name(cls, name: str) -> str:
        if not re.fullmatch("[A-Za-z0-9_-]{1,128}", name):
            raise PydanticCustomError("name", "a name has 1 to 128 letters, digits, underscores and dashes")
        return name

    @field_validator("parameters")
    @classmethod
    def _of_an_object(cls, schema: dict[str, Any]) -> dict[str, Any]:
        if schema.get("type", "object") != "object":
            raise PydanticCustomError("parameters", "give the JSON schema of an object: its type is 'object'")
        return schema if "type" in schema else {"type": "object"} | schema


class Tool(RequestModel):
    """A function in OpenAI's wrapping."""

    NO_EFFECT = frozenset(["cache_control"])

    type: Literal["function"]
    function: Function

    @model_validator(mode="before")
    @classmethod
    def _known_fields(cls, tool: object) -> object:
        if not isinstance(tool, dict) or not isinstance(tool.get("type"), str):
            raise PydanticCustomError("tool", 'a tool must be {"type": "function", "function": {...}}')
        if tool["type"] != "function":
            raise PydanticCustomError(
                "tool", f"tools of type '{tool['type'][:40]}' are not supported: 'function' only"
            )
        return sort_fields(cls, tool, "tools[].")


class ToolFields(RequestModel):
    """The fields of a request about tools."""

    tools: list[Tool] = Field(default_factory=list)
    tool_choice: Any = None
    parallel_tool_calls: bool = True

    _named: str | None = PrivateAttr(None)
    _only: frozenset[str] | None = PrivateAttr(None)
    _required: bool = PrivateAttr(False)

    @field_validator("tools", mode="before")
    @classmethod
    def _few_enough(cls, tools: object) -> object:
        if isinstance(tools, list) and len(tools) > MAX_TOOLS:
            raise PydanticCustomError("tools", f"at most {MAX_TOOLS} tools are possible")
        return tools

    @model_validator(mode="after")
    def _check_tools(self) -> Self:
        names = [tool.function.name for tool in self.tools]
        for name in names:
            if names.count(name) > 1:
                raise _refused("tools", f"two functions have the name '{name}'")
        if (size := len(json.dumps(self.tool_objects, ensure_ascii=False))) > MAX_GRAMMAR:
            raise _refused("tools", f"at most {MAX_GRAMMAR} characters are possible, these have {size}")
        self._choose(set(names))
        return self

    def _choose(self, names: set[str]) -> None:
        """What `tool_choice` says of the tools of these names."""
        choice = self.tool_choice
        kind = choice.get("type") if isinstance(choice, dict) else None
        if kind == "function":
            self._named = _name_of(choice, names)
        elif kind == "allowed_tools":
            limits = choice.get("allowed_tools")
            if choice.keys() != {"type", "allowed_tools"} or not isinstance(limits, dict):
                raise _refused("tool_choice", _ALLOWED)
            tools = limits.get("tools")
            if limits.keys() != {"mode", "tools"} or limits["mode"] not in ("auto", "required"):
                raise _refused("tool_choice", _ALLOWED)
            if not isinstance(tools, list) or not 0 < len(tools) <= MAX_TOOLS:
                raise _refused("tool_choice", _ALLOWED)
            self._only = frozenset(_name_of(tool, names) for tool in tools)
            self._required = limits["mode"] == "required"
        elif choice is not None and choice not in _CHOICES:
            raise _refused(
                "tool_choice", f"give 'none', 'auto' or 'required', or {_NAMED.removeprefix('give ')}"
            )
        elif choice == "required":
            self._required = True
            if not names:
                raise _refused("tool_choice", "'required' needs 'tools'")

    @property
    def tool_objects(self) -> list[dict[str, Any]]:
        """All tools as a chat template takes them."""
        return [tool.model_dump(exclude_none=True) for tool in self.tools]

    @property
    def may_call(self) -> bool:
        """Whether the answer may have calls."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def limited(self) -> bool:
        """Whether some of the tools that the model is told of may not be called."""
        return self._only is not None

    @property
    def allowed(self) -> dict[str, Function]:
        """What may be called, by name."""
        functions = {tool.function.name: tool.function for tool in self.tools if self.may_call}
        return {name: f for name, f in functions.items() if self._only is None or name in self._only}

    @property
    def offered(self) -> list[dict[str, Any]]:
        """The tools that the model is told of: none where it must not call any."""
        return self.tool_objects if self.may_call else []

    @property
    def demanded(self) -> list[str]:
        """The names of the tools of which one must be called; empty where none must."""
        if self._named is not None:
            return [self._named]
        return [*self.allowed] if self._required else []

    @property
    def single_call(self) -> bool:
        """Whether an answer has at most one call."""
        return self._named is not None or not self.parallel_tool_calls


_NAMED = 'give {"type": "function", "function": {"name": ...}}'
_ALLOWED = "'allowed_tools' needs a 'mode', 'auto' or 'required', and as 'tools' some of the functions by their names"


def _name_of(choice: object, names: set[str]) -> str:
    """The name in {"type": "function", "function": {"name": ...}}, one of `names`."""
    function = choice.get("function") if isinstance(choice, dict) else None
    if not isinstance(choice, dict) or choice.keys() != {"type", "function"} or choice["type"] != "function":
        raise _refused("tool_choice", _NAMED)
    if not isinstance(function, dict) or function.keys() != {"name"} or not isinstance(function["name"], str):
        raise _refused("tool_choice", _NAMED)
    if function["name"] not in names:
        raise _refused("tool_choice", f"there is no tool of the name '{function['name'][:64]}'")
    return function["name"]


def _refused(param: str, fault: str) -> Exception:
    return bad_request(f"Invalid value for '{param}': {fault}.", param, "invalid_value")
