"""How a conversation with tools becomes the messages of a chat template, and what is expected of the answer.

A template that knows tools gets them as transformers hands them over. For one that does not, or whose format of calls is not
known here, the tools are described in the system message, and calls and results are written out as text.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from serve import harmony, harmony_prompt
from serve.harmony import HarmonyReader
from serve.messages import Message
from serve.protocol import ChatFields, ChatRequest
from serve.reader import Reader
from serve.structured import GrammarSpec
from serve.text import TextTokenizer, ids_of
from serve.thought_prompt import ThoughtSupport
from serve.thoughts import AnswerReader, Beginning
from serve.tool_calls import MARKERS, CallParser
from serve.tool_formats import HARMONY, HERMES, ToolFormat, chosen_format, mentions_tools

_INSTRUCTION = """You can call functions. Each of these lines describes one, with a JSON schema of its arguments:
<tools>
{tools}
</tools>
To call a function, write its name and its arguments as JSON, in exactly this form:
{example}
The result will be given to you between <tool_response> and </tool_response>. If no function helps, answer in plain text."""
_THINKING = re.compile(r"\.thinking\b|\[['\"]thinking['\"]\]")  # a field of messages
_EXAMPLE = [("name-of-the-function", '{"name-of-an-argument": "value"}')]


@dataclass(frozen=True)
class ToolSupport:
    """What one model makes of tools."""

    tokenizer: TextTokenizer
    format: ToolFormat
    native: bool  # its template with tools writes calls in this format
    special: Mapping[str, int]  # ids of the format's markers that are special tokens

    @classmethod
    def of(cls, tokenizer: TextTokenizer, parser: str = "auto") -> "ToolSupport":
        """From the chat template, and one of PARSERS. Raises ValueError for "harmony" without its special tokens."""
        template = tokenizer.chat_template(with_tools=True) or ""
        chosen = chosen_format(template, parser)
        if chosen == HARMONY and len(ids_of(tokenizer, harmony.ESSENTIAL)) < len(harmony.ESSENTIAL):
            if parser == "harmony":
                raise ValueError(
                    "the tokenizer of this model lacks special tokens of the format 'harmony' "
                    f"({', '.join(harmony.ESSENTIAL)}): write auto for --tool-call-parser and --reasoning-parser"
                )
            chosen = None
        form = chosen or HERMES
        special = ids_of(tokenizer, harmony.MARKERS if form.style == "harmony" else MARKERS[form.style])
        return cls(tokenizer, form, chosen is not None and mentions_tools(template), special)

    @property
    def harmony(self) -> bool:
        """Whether answers are rows of messages, and calls are some of them."""
        return self.format.style == "harmony"

    def parser(self, request: ChatRequest) -> CallParser | None:
        """What reads the calls out of the text of one answer; None where there can be none.

        It sees what is generated alone: where a message is continued within a call, its rest is text.
        """
        if not request.may_call or self.format.style == "harmony":
            return None
        return CallParser(
            self.format.style,
            request.allowed.keys(),
            hidden=bool(self.special) and request.skip_special_tokens,
            single=request.single_call,
            only=request.limited,
            demanded=bool(request.demanded),
        )

    def reader(self, request: ChatRequest, beginning: Beginning, thoughts: ThoughtSupport) -> Reader:
        """What reads one answer."""
        if self.harmony:
            return HarmonyReader(
                {i: marker for marker, i in self.special.items()},
                beginning,
                request.allowed.keys() if request.may_call else None,
                thinks=thoughts.on,
                shown=request.include_reasoning,
                single=request.single_call,
                only=request.limited,
                endless=request.ignore_eos,
            )
        calls = self.parser(request)
        return AnswerReader(
            beginning,
            calls,
            shown=request.include_reasoning,
            markers=self.special.values() if calls else (),
            tags=thoughts.special.values() if beginning != "none" else (),
        )

    def grammar(self, request: ChatRequest) -> GrammarSpec | None:
        """The form of the answer: calls where they are demanded; where they may come, they or the form that is asked for."""
        answer = request.grammar_spec
        names = request.demanded
        # A message of harmony that is continued is no call.
        if (
            not names
            and answer
            and request.may_call
            and not (self.harmony and request.continue_final_message)
        ):
            names = [*request.allowed]
        if not names:
            return answer
        schemas = {name: request.allowed[name].parameters for name in names}
        many = not request.single_call
        return GrammarSpec(
            "tools", self.format.lark(schemas, self.special, many=many, answer=answer), "tools"
        )

    def conversation(self, fields: ChatFields) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
        """The messages and the tools for the chat template."""
        tools = fields.offered or None
        template = self.tokenizer.chat_template(with_tools=tools is not None) or ""
        if self.native and mentions_tools(template):
            messages, described = [message.for_template() for message in fields.messages], tools
            if self.harmony:
                messages = harmony_prompt.as_taken(messages)
                described = harmony_prompt.described(tools) if tools else None
        else:
            messages, described = self._as_text(fields.messages, tools or []), None
        if "reasoning_content" not in template:
            named = _THINKING.search(template)
            for message in messages:
                thoughts = message.pop("reasoning_content", None)
                if thoughts and named:
                    message["thinking"] = thoughts
        return messages, described

    def _as_text(self, messages: Sequence[Message], tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The same in messages of system, user and assistant alone."""
        written: list[tuple[dict[str, Any], list[str]]] = []  # messages, and the lines of each
        result_before = False
        for message in messages:
            fields = message.for_template()
            lines = [fields["content"]] if fields["content"] else []
            if fields.pop("tool_calls", None):
                # As the model wrote them, where it was this server's.
                given = [(c.function.name, c.function.arguments) for c in message.tool_calls or ()]
                lines.append(self.format.write(given))
            is_result = fields["role"] == "tool"
            if is_result:
                fields = {"role": "user"}
                lines = ["<tool_response>", *lines, "</tool_response>"]
            if result_before and fields["role"] == "user":  # some templates refuse two users in a row
                written[-1][1].extend(lines)
            else:
                written.append((fields, lines))
            result_before = is_result
        if tools:
            described = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
            if written[0][0]["role"] != "system":
                written.insert(0, ({"role": "system"}, []))
            system = written[0][1]
            system += [""] if system else []
            system.append(_INSTRUCTION.format(tools=described, example=self.format.write(_EXAMPLE)))
        return [fields | {"content": "\n".join(lines)} for fields, lines in written]
