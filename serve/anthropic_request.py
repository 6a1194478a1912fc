"""Bodies of POST /v1/messages: Anthropic's form of a conversation, brought into that of chat completions."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from serve.errors import NO_THREADS, APIError, bad_request, renamed
from serve.fields import RequestModel, sort_fields
from serve.messages import MAX_MESSAGES
from serve.protocol import MAX_STOPS, ChatRequest
from serve.stream import json_bytes
from serve.tools import MAX_TOOLS

# What a fault of the chat request is called here.
NAMES = {
    "max_completion_tokens": "max_tokens",
    r"response_format(\.json_schema)?": "output_config.format",
    r"tools\.(\d+)\.function\.parameters": r"tools.\1.input_schema",
    r"tools\.(\d+)\.function": r"tools.\1",
    "reasoning_effort": "output_config.effort",
    "stop": "stop_sequences",
}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class _Thinking(RequestModel):
    """`budget_tokens` limits nothing: a model thinks as long as it will, up to `max_tokens`."""

    NO_EFFECT = frozenset(["budget_tokens", "display"])

    type: Literal["enabled", "disabled", "adaptive"]

    @model_validator(mode="before")
    @classmethod
    def _known_fields(cls, given: object) -> object:
        return sort_fields(cls, given, "thinking.") if isinstance(given, dict) else given


class _OutputConfig(RequestModel):
    effort: str | None = None
    format: dict[str, Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _known_fields(cls, given: object) -> object:
        return sort_fields(cls, given, "output_config.") if isinstance(given, dict) else given


class _Conversation(RequestModel):
    """What a message and a count of its tokens have in common."""

    NO_EFFECT = frozenset(
        [
            "metadata",
            "service_tier",
            "speed",
            "diagnostics",
            "context_management",
            "betas",
            "cache_control",
            "inference_geo",
        ]
    )
    UNSUPPORTED = {"container": (), "mcp_servers": ([],)}  # noqa: RUF012 - a ClassVar in RequestModel

    messages: list[Any]
    model: str | None = None
    system: Any = None
    tools: list[Any] = Field(default_factory=list)
    tool_choice: dict[str, Any] | None = None
    thinking: _Thinking | None = None
    output_config: _OutputConfig = Field(default_factory=_OutputConfig)
    output_format: dict[str, Any] | None = None  # the older place of output_config.format

    def _as_chat(self) -> dict[str, Any]:
        messages = messages_of(self.messages, self.system)
        chat: dict[str, Any] = {"model": self.model, "messages": messages}
        last = messages[-1]
        if last["role"] == "assistant" and last["content"] and "tool_calls" not in last:
            chat["continue_final_message"] = True  # the answer goes on from there
        if len(self.tools) > MAX_TOOLS:
            raise _fault("tools", f"at most {MAX_TOOLS} tools are possible")
        chat["tools"] = [_tool(tool, n) for n, tool in enumerate(self.tools)]
        choice = {"type": "auto"} if self.tool_choice is None else self.tool_choice
        chosen = _tool_choice(choice)
        if not self.tools and choice["type"] in ("any", "tool"):
            raise _fault("tool_choice", "there are no 'tools' to choose from")
        chat["tool_choice"] = chosen if self.tools else None
        chat["parallel_tool_calls"] = not choice.get("disable_parallel_tool_use", False)
        if self.thinking:  # a variable of templates whose models may think or not
            chat["chat_template_kwargs"] = {"enable_thinking": self.thinking.type != "disabled"}
        form = self.output_config.format or self.output_format
        if form is not None:
            if form.keys() != {"type", "schema"} or form["type"] != "json_schema":
                raise _fault("output_config.format", 'give {"type": "json_schema", "schema": ...}')
            chat["response_format"] = {
                "type": "json_schema",
                "json_schema": {"name": "output", "schema": form["schema"]},
            }
        chat["reasoning_effort"] = self.output_config.effort
        return chat


class MessagesRequest(_Conversation):
    """Body of POST /v1/messages."""

    # 0: the prompt is read, so that the next turns find it, and nothing is said.
    max_tokens: int = Field(ge=0, lt=2**31)
    stop_sequences: list[str] = Field(default_factory=list, max_length=MAX_STOPS)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stream: bool = False
    thread: Any = None  # a conversation that the server keeps
    kv_retention: float | None = None  # of this server alone

    @classmethod
    def parse_chat(
        cls, body: object, defaults: Mapping[str, Any] = MappingProxyType({})
    ) -> tuple[Self, ChatRequest]:
        """The body, and the chat completion that it asks for. Raises APIError (400) in the body's own words."""
        request = cls.parse(body)
        if request.thread is not None:
            message = "'thread' is not supported by this server: send the whole conversation in 'messages'."
            raise bad_request(message, "thread", NO_THREADS)
        same = ("temperature", "top_p", "top_k", "stream", "kv_retention")
        chat = {name: getattr(request, name) for name in same}
        chat |= {"max_completion_tokens": max(1, request.max_tokens), "stop": request.stop_sequences}
        return request, _chat(request._as_chat() | chat, defaults)


class CountRequest(_Conversation):
    """Body of POST /v1/messages/count_tokens."""

    @classmethod
    def parse_chat(cls, body: object) -> ChatRequest:
        """The chat completion whose prompt is counted. Raises APIError (400)."""
        return _chat(cls.parse(body)._as_chat(), {})


def _chat(body: dict[str, Any], defaults: Mapping[str, Any]) -> ChatRequest:
    with renamed(NAMES):
        return ChatRequest.parse(body, defaults)


def messages_of(given: list[Any], system: object) -> list[dict[str, Any]]:
    """The messages of a chat that 'messages' and 'system' stand for. Raises APIError."""
    if not 0 < len(given) <= MAX_MESSAGES:
        raise _fault("messages", f"give 1 to {MAX_MESSAGES} messages")
    messages: list[dict[str, Any]] = []
    if system is not None and system != "":
        messages.append({"role": "system", "content": _text(system, "system")})
    for n, message in enumerate(given):
        where = f"messages.{n}"
        if not isinstance(message, dict) or message.get("role") not in ("user", "assistant", "system"):
            raise _fault(where, "a message must be an object whose 'role' is 'user' or 'assistant'")
        blocks = message.get("content")
        if isinstance(blocks, str):
            blocks = [{"type": "text", "text": blocks}]
        if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
            raise _fault(f"{where}.content", "give a text or a list of blocks")
        add = _add_answer if message["role"] == "assistant" else _add_turn
        add(messages, message["role"], blocks, f"{where}.content")
    return messages


def _add_turn(messages: list[dict[str, Any]], role: str, blocks: list[dict[str, Any]], where: str) -> None:
    """Results of tools each become a message, before what else the turn says."""
    texts = []
    for n, block in enumerate(blocks):
        if block.get("type") == "tool_result":
            content = _text(block.get("content", ""), f"{where}.{n}.content")
            if not isinstance(failed := block.get("is_error"), bool | None):
                raise _fault(f"{where}.{n}.is_error", "give true or false")
            if failed:  # templates have no other place for it
                content = f"Error: {content}"
            asked = _string(block, "tool_use_id", f"{where}.{n}")
            messages.append({"role": "tool", "tool_call_id": asked, "content": content})
        else:
            texts.append(_text([block], f"{where}.{n}"))
    if texts or not blocks:
        messages.append({"role": role, "content": "\n".join(texts)})


def _add_answer(messages: list[dict[str, Any]], role: str, blocks: list[dict[str, Any]], where: str) -> None:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for n, block in enumerate(blocks):
        kind = block.get("type")
        if kind == "tool_use":
            if not isinstance(block.get("input"), dict):
                raise _fault(f"{where}.{n}.input", "give an object")
            name, arguments = _string(block, "name", f"{where}.{n}"), json_bytes(block["input"]).decode()
            call = {"type": "function", "function": {"name": name, "arguments": arguments}}
            calls.append(call | {"id": _string(block, "id", f"{where}.{n}")})
        elif kind == "thinking" and isinstance(block.get("thinking"), str):
            thoughts.append(block["thinking"])
        elif kind != "redacted_thinking":
            texts.append(_text([block], f"{where}.{n}"))
    if len(calls) > MAX_TOOLS:
        raise _fault(where, f"at most {MAX_TOOLS} blocks of type 'tool_use' are possible")
    message: dict[str, Any] = {"role": role, "content": "".join(texts)}
    if calls:
        message["tool_calls"] = calls
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    messages.append(message)


def _string(block: dict[str, Any], name: str, where: str) -> str:
    """A field that must be there; a fault of the chat message would have another place and name."""
    value = block.get(name)
    if not isinstance(value, str) or not value:
        raise _fault(f"{where}.{name}", "give a string that is not empty")
    return value


def _text(content: object, where: str) -> str:
    """The text of a content that is one, or a list of blocks."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _fault(where, "give a text or a list of blocks")
    texts = []
    for block in content:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind != "text":
            raise _fault(where, f"blocks of type {str(kind)[:40]!r} are not supported: text only")
        if not isinstance(block.get("text"), str):
            raise _fault(where, "a block of text needs a string 'text'")
        texts.append(block["text"])
    return "\n".join(texts)


def _tool(tool: object, n: int) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise _fault(f"tools.{n}", "a tool must be an object")
    if (kind := tool.get("type")) not in (None, "custom"):
        raise _fault(f"tools.{n}", f"tools of type {str(kind)[:40]!r} are not supported: your own only")
    function = {"name": tool.get("name"), "description": tool.get("description")}
    return {"type": "function", "function": function | {"parameters": tool.get("input_schema")}}


def _tool_choice(choice: dict[str, Any]) -> object:
    kind = choice.get("type")
    if unknown := choice.keys() - {"type", "name", "disable_parallel_tool_use"}:
        raise _fault("tool_choice", f"it has no field {min(unknown)[:40]!r}")
    if not isinstance(choice.get("disable_parallel_tool_use", False), bool):
        raise _fault("tool_choice.disable_parallel_tool_use", "give true or false")
    if kind == "tool":
        if not isinstance(choice.get("name"), str):
            raise _fault("tool_choice.name", "give the name of one of the 'tools'")
        return {"type": "function", "function": {"name": choice["name"]}}
    if not isinstance(kind, str) or kind not in _CHOICES:
        raise _fault("tool_choice", "its type must be 'auto', 'any', 'tool' or 'none'")
    return _CHOICES[kind]


def _fault(where: str, what: str) -> APIError:
    return bad_request(f"Invalid value for '{where}': {what}.", where, "invalid_value")
