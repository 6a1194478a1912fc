"""The form that a request wants its answer to have: OpenAI's `response_format`, and vLLM's fields for the same thing.

All become a `GrammarSpec`: a grammar in the notation of `llguidance`, which is Lark's with additions. It holds from the
first generated token on, or from the first one after the thoughts of a model that thinks (`serve.thought_prompt`).
"""

import itertools
import json
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, NamedTuple, Self

import pydantic_core
from llguidance import regex_to_lark
from pydantic import Field, model_validator

from serve.errors import APIError, bad_request
from serve.fields import RequestModel, at_most, sort_fields
from serve.schemas import json_rule

Kind = Literal["json", "regex", "choice", "grammar", "json_object", "tools"]
MAX_GRAMMAR = 2**17  # characters of a schema, of all choices, of a grammar
MAX_REGEX = 4096  # characters
TOO_LARGE = "a number in the schema is larger than a double can be"
MAX_SPACE = 40  # spaces and line breaks between two parts of JSON: a model must not go on with them for ever
_MOST_NAMES, _MOST_PARTS = 4, 10_000  # looked for, and looked at, to say where in a schema something is wrong
_JSON_KEYS = frozenset(("name", "description", "schema", "strict"))
_MOST_KEYS = 16

type _Place = tuple[_Place, str | int] | None  # in a schema: where it is, and its key there


class GrammarSpec(NamedTuple):
    """What an answer must look like; `param` is the field of the request that says so."""

    kind: Kind
    text: str  # as the client wrote it; of JSON and choices as JSON, of tools the grammar
    param: str
    thoughts: str = ""  # the rules of what comes before, in which the answer is `form`

    @property
    def lark(self) -> str:
        """The same as a grammar."""
        form = self._form
        # Nested, so that its rules may have any names.
        return f"{self.thoughts}\nform: %lark {{\n{form}\n}}" if self.thoughts else form

    @property
    def _form(self) -> str:
        if self.kind == "regex":
            return f"start: /{regex_to_lark(self.text, 'd')}/"
        if self.kind == "choice":
            return "start: CHOICE\nCHOICE: " + " | ".join(
                json.dumps(choice, ensure_ascii=False).replace("\x7f", "\\u007f")
                for choice in json.loads(self.text)
            )
        if self.kind in ("grammar", "tools"):
            return self.text
        schema = json.loads(self.text)
        if not isinstance(schema, dict):
            schema = {} if schema else {"not": {}}
        layout = {"whitespace_flexible": True, "whitespace_pattern": f"[ \\n\\r\\t]{{1,{MAX_SPACE}}}"}
        return f"start: {json_rule(schema, layout)}"

    def error(self, fault: str) -> APIError:
        """The 400 that says what is wrong, and where if that can be said."""
        if "NoExtensionBias" in fault:
            fault = "no text can follow it"
        fault = fault.replace(
            " Enable 'coerce_one_of' option to approximate oneOf with anyOf", " Write anyOf"
        )
        if self.kind == "grammar":
            return _refused(self.param, fault)
        # Its lines and columns are those of what was made of it.
        where = re.match(r"line (\d+), column \d+: (failed to compile JSON schema: )?", fault)
        fault = fault[where.end() :] if where else fault
        if self.kind == "json":
            fault += _at(fault, json.loads(self.text))
        if self.kind == "tools" and where:
            return _fault_of_part(self.text, int(where[1]), fault) or _refused(self.param, fault)
        return _refused(self.param, fault)


def _refused(param: str, fault: str) -> APIError:
    return bad_request(f"Invalid value for '{param}': {fault.rstrip('.')}.", param, "invalid_value")


def _fault_of_part(lark: str, line: int, fault: str) -> APIError | None:
    """The error of a line (from 1) of a grammar of tools; `serve.tool_formats` has written where it is from above it."""
    above, written = lark.split("\n")[line - 2 : line] if line > 1 else ("", "")
    if (where := re.fullmatch(r"// (\S+)(?: (\S+))?", above)) is None:
        return None
    if schema := re.match(r"\w+: %json (.*)", written):
        fault += _at(fault, json.loads(schema[1]))
    return _refused(where[1], f"the parameters of '{where[2]}': {fault}" if where[2] else fault)


def _at(fault: str, schema: Any) -> str:
    """Where in a schema the first thing is that an error names: the first object that has such a key, as a JSON pointer.

    Looks for a few names in a part of the schema: an error may quote all that a client wrote, and the event loop waits.
    """
    names = list(dict.fromkeys(re.findall(r'"([^"]+)"', fault)))[:_MOST_NAMES]
    places: dict[str, _Place] = {}
    for part, place in itertools.islice(_parts(schema), _MOST_PARTS if names else 0):
        for name in names if isinstance(part, dict) else ():
            if name in part:
                places.setdefault(name, place)
        if names[0] in places:
            break
    found = next((name for name in names if name in places), None)
    return "" if found is None else f" (at '#{_pointer(places[found])}')"


def _parts(value: Any, place: _Place = None) -> Iterator[tuple[Any, _Place]]:
    """All values in a schema, and where; each before those in it."""
    yield value, place
    if isinstance(value, (dict, list)):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _parts(part, (place, key))


def _pointer(place: _Place) -> str:
    keys = []
    while place is not None:
        place, key = place
        keys.append(f"/{key}")
    return "".join(reversed(keys))


def _json_spec(schema: Any, param: str, kind: Kind = "json") -> GrammarSpec:
    if isinstance(schema, str):
        if len(schema) > MAX_GRAMMAR:
            raise _refused(param, f"a schema may have at most {MAX_GRAMMAR} characters")
        try:
            schema = pydantic_core.from_json(schema, allow_inf_nan=False)
        except ValueError as error:
            raise _refused(param, f"the string is not valid JSON: {error}") from None
    if not isinstance(schema, dict):
        raise _refused(param, "give a JSON schema, as an object or as a string that holds one")
    try:
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except ValueError:  # as 1e999 is read
        raise _refused(param, TOO_LARGE) from None
    if len(text) > MAX_GRAMMAR:
        raise _refused(param, f"a schema may have at most {MAX_GRAMMAR} characters, this one has {len(text)}")
    return GrammarSpec(kind, text, param)


def _choice_spec(choices: list[str], param: str) -> GrammarSpec:
    if not choices:
        raise _refused(param, "give at least one choice")
    if not all(choices):
        raise _refused(param, "a choice must not be empty")
    text = json.dumps(choices, ensure_ascii=False)
    if len(text) > MAX_GRAMMAR:
        raise _refused(
            param, f"all choices may have at most {MAX_GRAMMAR} characters, these have {len(text)}"
        )
    return GrammarSpec("choice", text, param)


def _text_spec(kind: Literal["regex", "grammar"], text: str, param: str) -> GrammarSpec:
    most = MAX_REGEX if kind == "regex" else MAX_GRAMMAR
    if not text:
        raise _refused(param, "it is empty: leave it out for any text")
    if len(text) > most:
        raise _refused(param, f"at most {most} characters are possible, this has {len(text)}")
    return GrammarSpec(kind, text, param)


def _spec(kind: str, value: Any, param: str) -> GrammarSpec:
    if kind == "json":
        return _json_spec(value, param)
    if kind == "choice":
        return _choice_spec(value, param)
    return _text_spec("regex" if kind == "regex" else "grammar", value, param)


def _any_object(param: str) -> GrammarSpec:
    return _json_spec({"type": "object"}, param, "json_object")


class ResponseFormat(RequestModel):
    """OpenAI's `response_format`. A schema is always followed to the letter, whatever `strict` says."""

    type: str
    json_schema: Annotated[dict[str, Any], at_most(_MOST_KEYS)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _known_fields(cls, given: object) -> object:
        if not isinstance(given, dict) or not isinstance(given.get("type"), str):
            raise _refused("response_format", "give an object with a 'type'")
        if (kind := given["type"]) not in ("text", "json_object", "json_schema"):
            raise bad_request(
                f"'response_format' of type '{kind[:40]}' is not supported: use 'text', 'json_object' or 'json_schema', "
                "or 'structured_outputs' for a regular expression, choices or a grammar.",
                "response_format.type",
                "unsupported_parameter",
            )
        fields = sort_fields(cls, given, "response_format.")
        if ("json_schema" in fields) != (kind == "json_schema"):
            raise _refused(
                "response_format", "'json_schema' belongs to the type 'json_schema', and must be there"
            )
        return fields

    @property
    def spec(self) -> GrammarSpec | None:
        """The grammar; None for any text."""
        if self.json_schema is None:
            return _any_object("response_format") if self.type == "json_object" else None
        param = "response_format.json_schema"
        for name in self.json_schema.keys() - _JSON_KEYS:
            raise bad_request(
                f"Unknown field '{param}.{name[:80]}'.", f"{param}.{name[:80]}", "unknown_parameter"
            )
        return _json_spec(self.json_schema.get("schema"), f"{param}.schema")


class StructuredOutputs(RequestModel):
    """vLLM's `structured_outputs`: one kind of grammar."""

    UNSUPPORTED = {  # noqa: RUF012 - declared a ClassVar in RequestModel
        "structural_tag": (),
        "whitespace_pattern": (),
        "disable_fallback": (True, False),  # there is nothing to fall back to
        "disable_any_whitespace": (False,),
        "disable_additional_properties": (False,),
    }

    schema_: Any = Field(None, alias="json")  # a field of that name would hide a method of the base class
    regex: str | None = None
    choice: list[str] | None = Field(None, fail_fast=True)
    grammar: str | None = None
    json_object: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _known_fields(cls, given: object) -> object:
        if not isinstance(given, dict):
            raise _refused("structured_outputs", "give an object with 'json', 'regex', 'choice' or 'grammar'")
        return sort_fields(cls, given, _PATH)

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        if len(self.specs) != 1:
            raise _refused(
                "structured_outputs",
                f"give exactly one of 'json', 'regex', 'choice', 'grammar' and 'json_object': true, not {len(self.specs)}",
            )
        return self

    @property
    def specs(self) -> list[GrammarSpec]:
        """All that were given."""
        given = {"json": self.schema_, "regex": self.regex, "choice": self.choice, "grammar": self.grammar}
        found = [_spec(kind, value, _PATH + kind) for kind, value in given.items() if value is not None]
        return [*found, _any_object(_PATH + "json_object")] if self.json_object else found


_PATH = "structured_outputs."


def only_spec(
    response_format: ResponseFormat | None, structured: StructuredOutputs | None, guided: Mapping[str, Any]
) -> GrammarSpec | None:
    """The form that a request asks for, if any; `guided` are the fields "guided_KIND". Raises APIError for two."""
    found = [_spec(kind, value, f"guided_{kind}") for kind, value in guided.items() if value is not None]
    if response_format is not None and (spec := response_format.spec) is not None:
        found.append(spec)
    if structured is not None:
        found += structured.specs
    if len(found) > 1:
        raise bad_request(
            f"'{found[0].param}' and '{found[1].param}' cannot be used together: an answer has one form.",
            found[1].param,
            "invalid_value",
        )
    return found[0] if found else None
