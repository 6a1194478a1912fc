"""Bodies of POST /v1/responses: OpenAI's other form of a conversation, brought into that of chat completions."""

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from serve.errors import APIError, bad_request, renamed
from serve.fields import RequestModel, at_most, sort_fields
from serve.messages import MAX_MESSAGES
from serve.protocol import INT64, MAX_TOP_LOGPROBS, PLATFORM_FIELDS, ChatRequest

MAX_METADATA = 16  # as many as OpenAI takes
_LOGPROBS = "message.output_text.logprobs"
_INCLUDABLE = (_LOGPROBS, "reasoning.encrypted_content")  # the latter: thoughts come in plain text anyway
_TEXT_PARTS = ("input_text", "output_text", "text")
_RESEND = "send the earlier turns in 'input': what of them is in the cache is found by itself"

# What a fault of the chat request is called here; a place in its messages first (`_Conversation.place`).
_PLACE = r"messages\.(\d+)(\.content|\.tool_calls\.\d+)?"
CHAT_NAMES = {
    r"(input\.\d+)\.(?:tool_call_id|id)": r"\1.call_id",
    r"(input\.\d+)\.function": r"\1",
    "tool_call_id": "call_id",
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    r"response_format(\.json_schema)?": "text.format",
    r"tools\.(\d+)\.function": r"tools.\1",
    r"tools\[\]\.function": "tools[]",
    "reasoning_effort": "reasoning.effort",
}


class _Text(RequestModel):
    NO_EFFECT = frozenset(["verbosity"])

    format: dict[str, Any] = Field(default_factory=lambda: {"type": "text"})

    @model_validator(mode="before")
    @classmethod
    def _known_fields(cls, given: object) -> object:
        return sort_fields(cls, given, "text.") if isinstance(given, dict) else given


class _Reasoning(RequestModel):
    NO_EFFECT = frozenset(["summary", "generate_summary"])
    UNSUPPORTED = {"context": ("auto",), "mode": ("standard",)}  # noqa: RUF012 - a ClassVar in RequestModel

    effort: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _known_fields(cls, given: object) -> object:
        return sort_fields(cls, given, "reasoning.") if isinstance(given, dict) else given


class ResponsesRequest(RequestModel):
    """Body of POST /v1/responses; `chat` is the same as a chat completion."""

    NO_EFFECT = (PLATFORM_FIELDS - {"metadata"}) | {"stream_options", "moderation"}
    UNSUPPORTED = {  # noqa: RUF012 - a ClassVar in RequestModel
        "background": (False,),
        "conversation": (),
        "max_tool_calls": (),
        "previous_response_id": (),
        "prompt": (),
        "context_management": (),
    }
    INSTEAD = {"previous_response_id": _RESEND, "conversation": _RESEND}  # noqa: RUF012

    input: Any
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = Field(default=None, ge=-INT64, lt=INT64)
    kv_retention: float | None = None
    tools: list[Any] = Field(default_factory=list)
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: _Text = Field(default_factory=_Text)
    reasoning: _Reasoning = Field(default_factory=_Reasoning)
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    include: list[str] = Field(default_factory=list, fail_fast=True)
    stream: bool = False
    truncation: Literal["auto", "disabled"] = "disabled"
    metadata: Annotated[dict[str, str], at_most(MAX_METADATA)] = Field(default_factory=dict)

    @classmethod
    def parse_chat(
        cls, body: object, defaults: Mapping[str, Any] = MappingProxyType({})
    ) -> tuple[Self, ChatRequest]:
        """The body, and the chat completion that it asks for. Raises APIError (400) in the body's own words."""
        request = cls.parse(body)
        conversation = conversation_of(request.input, request.instructions)
        with renamed({_PLACE: conversation.place, **CHAT_NAMES}):
            return request, ChatRequest.parse(request._as_chat(conversation.messages), defaults)

    def _as_chat(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        for name in self.include:
            if name not in _INCLUDABLE:
                raise bad_request(
                    f"'include' has '{name[:80]}', which is not supported: {' or '.join(_INCLUDABLE)}.",
                    "include",
                    "unsupported_parameter",
                )
        same = (
            "model", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
            "repetition_penalty", "seed", "kv_retention", "parallel_tool_calls", "stream",
        )  # fmt: skip
        chat = {name: getattr(self, name) for name in same}
        chat |= {
            "messages": messages,
            "max_completion_tokens": self.max_output_tokens,
            "response_format": _response_format(self.text.format),
            "reasoning_effort": self.reasoning.effort,
            "tools": [_tool(tool, n) for n, tool in enumerate(self.tools)],
            "tool_choice": _tool_choice(self.tool_choice),
        }
        if self.logprobs:
            chat |= {"logprobs": True, "top_logprobs": self.top_logprobs or 0}
        return chat

    @property
    def logprobs(self) -> bool:
        """Whether the text comes with its log-probabilities."""
        return _LOGPROBS in self.include or bool(self.top_logprobs)


def conversation_of(given: object, instructions: str | None) -> "_Conversation":
    """The messages of a chat that 'input' and 'instructions' stand for. Raises APIError."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise _fault("give a text, or a list of items that is not empty")
    if len(given) > MAX_MESSAGES:
        raise _fault(f"at most {MAX_MESSAGES} items are possible")
    conversation = _Conversation()
    if instructions:
        conversation.add({"role": "system", "content": instructions})
    for n, item in enumerate(given):
        conversation.item = f"input.{n}"
        if not isinstance(item, dict):
            raise _fault("an item must be an object")
        kind = item.get("type", "message")
        add = _ITEMS.get(kind) if isinstance(kind, str) else None
        if add is None:
            raise _fault(f"items of type {str(kind)[:40]!r} are not supported: {', '.join(_ITEMS)} are")
        add(conversation, item)
    if not conversation.messages:
        raise _fault("there is no message in it, nor a call: give what is to be answered")
    return conversation


class _Conversation:
    """Messages of a chat; thoughts, text and calls of one answer become one message."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.item = "instructions"  # what is taken in
        self._places: dict[str, str] = {}  # what _PLACE can match: where the client finds it

    def place(self, found: re.Match[str]) -> str:
        """The client's own name for a place in the messages; its words may look like one that is not there."""
        item = self._places.get(f"messages.{found[1]}", "input")
        return self._places.get(found[0]) or item + (found[2] or "")

    def add(self, message: dict[str, Any]) -> None:
        self._places[f"messages.{len(self.messages)}"] = self.item
        self.messages.append(message)

    def message(self, item: dict[str, Any]) -> None:
        role, content = item.get("role"), _text(item.get("content"))
        if (
            role in ("system", "developer")
            and len(self.messages) == 1
            and self.messages[0]["role"] == "system"
            and isinstance(content, str)
        ):
            # Instructions and a system message: templates know one, in the beginning.
            self.messages[0]["content"] += f"\n\n{content}"
        elif role == "assistant":
            self._answer("content")["content"] = content  # after calls, too: their results follow it
            self._places[f"messages.{len(self.messages) - 1}.content"] = f"{self.item}.content"
        else:
            self.add({"role": role, "content": content})

    def call(self, item: dict[str, Any]) -> None:
        function = {key: item[key] for key in ("name", "arguments") if key in item}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        calls = self._answer().setdefault("tool_calls", [])
        self._places[f"messages.{len(self.messages) - 1}.tool_calls.{len(calls)}"] = self.item
        calls.append(call)

    def result(self, item: dict[str, Any]) -> None:
        content = _text(item.get("output"))
        self._places[f"messages.{len(self.messages)}.content"] = f"{self.item}.output"
        self.add({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})

    def thoughts(self, item: dict[str, Any]) -> None:
        parts = item.get("content") or []
        if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
            raise _fault("the 'content' of reasoning must be a list of parts")
        text = "".join(part["text"] for part in parts if isinstance(part.get("text"), str))
        if text:  # a summary is not what the model has thought
            self._answer("tool_calls", "reasoning_content")["reasoning_content"] = text

    def _answer(self, *unless: str) -> dict[str, Any]:
        """The last message if it is the assistant's and has nothing yet of what `unless` says; or a new one."""
        last = self.messages[-1] if self.messages else None
        if last and last["role"] == "assistant" and not last.keys() & set(unless):
            return last
        self.add({"role": "assistant"})
        return self.messages[-1]


_ITEMS: dict[str, Callable[[_Conversation, dict[str, Any]], None]] = {
    "message": _Conversation.message,
    "function_call": _Conversation.call,
    "function_call_output": _Conversation.result,
    "reasoning": _Conversation.thoughts,
}


def _text(content: object) -> Any:
    """The text of a content that is one, or a list of parts."""
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in _TEXT_PARTS:
            raise _fault(f"parts of type {str(kind)[:40]!r} are not supported: text only")
        if not isinstance(part.get("text"), str):
            raise _fault("a part of text needs a string 'text'")
        texts.append(part["text"])
    return "\n".join(texts)


def _tool(tool: object, n: int) -> object:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        return tool  # refused by its type
    if tool.get("function") is not None:  # as chat completions have it
        fault = "take 'function' away: name, description and parameters stand beside the 'type' here"
        raise _fault(fault, f"tools.{n}")
    return {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}


def _tool_choice(choice: object) -> object:
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == "function" and choice.keys() == {"type", "name"}:
        return {"type": "function", "function": {"name": choice["name"]}}
    if choice.get("type") == "allowed_tools":
        limits = {key: value for key, value in choice.items() if key != "type"}
        if isinstance(limits.get("tools"), list):
            limits["tools"] = [_tool_choice(tool) for tool in limits["tools"]]
        return {"type": "allowed_tools", "allowed_tools": limits}
    return choice


def _response_format(form: dict[str, Any]) -> dict[str, Any]:
    if form.get("type") != "json_schema":
        return form
    return {"type": "json_schema", "json_schema": {k: v for k, v in form.items() if k != "type"}}


def _fault(what: str, where: str = "input") -> APIError:
    return bad_request(f"Invalid value for '{where}': {what}.", where, "invalid_value")


def echoed(request: ResponsesRequest, chat: ChatRequest) -> dict[str, Any]:
    """What a response says of its request."""
    return {
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "temperature": chat.temperature,
        "top_p": chat.top_p,
        "top_logprobs": request.top_logprobs or 0,
        "tools": request.tools,
        "tool_choice": "auto" if request.tool_choice is None else request.tool_choice,
        "parallel_tool_calls": chat.parallel_tool_calls,
        "text": {"format": request.text.format},
        "reasoning": {"effort": chat.reasoning_effort, "summary": None},
        "truncation": request.truncation,
        "previous_response_id": None,
        "background": False,
        "store": False,
        "metadata": request.metadata,
    }
