"""How models write calls of tools: as text, as a grammar, and which of the formats a chat template asks for."""

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import jinja2

from serve import harmony
from serve.errors import bad_request
from serve.schemas import json_rule
from serve.structured import TOO_LARGE, GrammarSpec
from serve.tool_calls import HERMES_END, HERMES_START, MISTRAL_ARGUMENTS, MISTRAL_START, Style

# A call as json.dumps and the templates write it, so that the next turn has the same text, and with luck the same tokens.
_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class ToolFormat(NamedTuple):
    """The texts before, between and after the calls of an answer, their names and their arguments."""

    style: Style | Literal["harmony"]
    first: str
    opening: str
    middle: str
    closing: str
    separator: str
    last: str
    json_names: bool = True
    several: bool = True  # whether the templates of such models take an answer with more than one call back
    answer: str = ""  # before one that is no call

    def write(self, calls: Sequence[tuple[str, str]]) -> str:
        """Calls, each a name and its arguments as JSON, as a model writes them."""
        written = [
            f"{self.opening}{self._name(name)}{self.middle}{text}{self.closing}" for name, text in calls
        ]
        return self.first + self.separator.join(written) + self.last

    def lark(
        self,
        schemas: Mapping[str, Any],
        special: Mapping[str, int],
        *,
        many: bool,
        answer: GrammarSpec | None = None,
    ) -> str:
        """The grammar of one call, or with `many` of any number of them, of functions whose arguments have these schemas.

        With `answer` (of any kind but "grammar") such an answer will do as well. `special`: ids of markers that are special
        tokens. What comes from a field of the request stands below the field's name, for `GrammarSpec.error`. Raises
        APIError for a schema with a number that is none.
        """

        more = f"({literal(self.separator, special)} call)*" if many and self.several else ""
        lines = [
            "start: calls" + (f" | {literal(self.answer, special)} answer" if answer else ""),
            f"calls: {literal(self.first, special)} call {more} {literal(self.last, special)}",
            "call: " + " | ".join(f"call{i}" for i in range(len(schemas))),
        ]
        for i, (name, schema) in enumerate(schemas.items()):
            before = self.opening + self._name(name) + self.middle
            # An answer that is JSON begins with a token of JSON: one longer text would have to go on where that could.
            before = _json_tokens(before) if answer and before[0] == "{" else literal(before, special)
            after = literal(self.closing, special)
            lines += [f"call{i}: {before} arguments{i} {after}", f"// tools {name}"]
            try:
                lines.append(f"arguments{i}: {json_rule(schema, _LAYOUT)}")
            except ValueError:  # as 1e999 is read
                raise bad_request(
                    f"Invalid value for 'tools': the parameters of '{name}': {TOO_LARGE}.",
                    "tools",
                    "invalid_value",
                ) from None
        if answer:
            lines += [f"// {answer.param}", answer.lark.replace("start:", "answer:", 1)]
        return "\n".join(lines)

    def _name(self, name: str) -> str:
        return _quoted(name) if self.json_names else name


def literal(text: str, special: Mapping[str, int]) -> str:
    """A text in a grammar; `special`: ids of the parts of it that are special tokens."""
    parts = re.split("(" + "|".join(map(re.escape, special)) + ")", text) if special else [text]
    return " ".join(f"<[{special[p]}]>" if p in special else _quoted(p) for p in parts if p)


def _json_tokens(text: str) -> str:
    return " ".join(map(_quoted, re.findall(r'"(?:[^"\\]|\\.)*"|\s+|[^"\s]', text)))


def _quoted(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


_NAMED = '{"name": '
HERMES = ToolFormat(
    "hermes", "", f"{HERMES_START}\n{_NAMED}", ', "arguments": ', "}\n" + HERMES_END, "\n", ""
)
LLAMA3_JSON = ToolFormat("llama3_json", "", _NAMED, ', "parameters": ', "}", "; ", "", several=False)
MISTRAL = ToolFormat("mistral", f"{MISTRAL_START} [", _NAMED, ', "arguments": ', "}", ", ", "]")
MISTRAL_NAMED = ToolFormat("mistral", "", MISTRAL_START, MISTRAL_ARGUMENTS, "", "", "", json_names=False)
# The token that ends a call ends the answer.
HARMONY = ToolFormat(
    "harmony",
    "",
    f"{harmony.CHANNEL}commentary to={harmony.FUNCTIONS}",
    f" {harmony.CONSTRAIN}json{harmony.MESSAGE}",
    "",
    "",
    "",
    json_names=False,
    several=False,
    answer=f"{harmony.CHANNEL}final{harmony.MESSAGE}",
)
PARSERS = ("auto", "harmony", "hermes", "llama3_json", "mistral")


@lru_cache(maxsize=4)
def mentions_tools(template: str) -> bool:
    """Whether a chat template has anything to do with a variable `tools`."""
    try:
        return any(
            kind == "name" and value == "tools" for _, kind, value in jinja2.Environment().lex(template)
        )
    except jinja2.TemplateError:
        return False  # rendering it says what is wrong


@lru_cache(maxsize=4)
def format_of(template: str) -> ToolFormat | None:
    """The format that a chat template asks its model for, by what only that one has; None: none that is known here."""
    if all(marker in template for marker in harmony.ESSENTIAL):
        return HARMONY
    arguments = re.search(r'"arguments\\?"', template)
    if MISTRAL_START in template:
        if MISTRAL_ARGUMENTS in template:
            return MISTRAL_NAMED
        return MISTRAL._replace(first=f"{MISTRAL_START}[") if f"{MISTRAL_START}[" in template else MISTRAL
    if HERMES_START in template and arguments:
        return HERMES
    if re.search(r'"parameters\\?"', template) and re.search("ipython|python_tag", template):
        return LLAMA3_JSON
    return None


def chosen_format(template: str, parser: str) -> ToolFormat | None:
    """The format that `parser` of PARSERS stands for with this template."""
    found = format_of(template)
    if parser == "auto" or (found is not None and found.style == parser):
        return found
    return {"harmony": HARMONY, "hermes": HERMES, "llama3_json": LLAMA3_JSON, "mistral": MISTRAL}[parser]
