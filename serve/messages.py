"""The turns of a conversation in a request body, calls of tools and their results included."""

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, FailFast, Field, PrivateAttr, field_validator, model_validator
from pydantic_core import PydanticCustomError

from serve.arguments import object_of
from serve.fields import RequestModel, sort_fields
from serve.tools import MAX_TOOLS

MAX_MESSAGES = 4096
_ROLES = ("system", "developer", "user", "assistant", "tool")


class CalledFunction(RequestModel):
    """A function that was called, and its arguments as text: JSON, if the model kept to it."""

    NO_EFFECT = frozenset(["parsed_arguments"])  # what OpenAI's client makes of them

    name: str = Field(min_length=1)
    arguments: str

    _parsed: dict[str, Any] = PrivateAttr(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _known_fields(cls, function: object) -> object:
        if not isinstance(function, dict):
            raise PydanticCustomError("function", "give an object with 'name' and 'arguments'")
        fields = sort_fields(cls, function, "messages[].tool_calls[].function.")
        return fields | ({"arguments": "{}"} if function.get("arguments", "") is None else {})

    @field_validator("arguments")
    @classmethod
    def _none_at_all(cls, arguments: str) -> str:
        return "{}" if arguments.strip() in ("", "null") else arguments

    @model_validator(mode="after")
    def _read_arguments(self) -> Self:
        # A model may have written anything: refused, it would end the conversation.
        found = object_of(self.arguments)
        self._parsed = {"arguments": self.arguments} if found is None else found
        return self

    @property
    def parsed(self) -> dict[str, Any]:
        """The arguments; what is no object is the value of one, as templates take nothing else."""
        return self._parsed


class MessageCall(RequestModel):
    """A call that the model made in an earlier turn."""

    NO_EFFECT = frozenset(["index"])  # of its chunks, where a client has put them together

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction

    @model_validator(mode="before")
    @classmethod
    def _known_fields(cls, call: object) -> object:
        if not isinstance(call, dict):
            raise PydanticCustomError("call", 'a call must be {"id", "type": "function", "function": {...}}')
        return sort_fields(cls, call, "messages[].tool_calls[].")


class Message(RequestModel):
    """One turn of a conversation; `content` is text once parsed."""

    NO_EFFECT = frozenset(["annotations", "id", "parsed"])
    UNSUPPORTED = {"function_call": (), "audio": (), "refusal": ()}  # noqa: RUF012 - a ClassVar in RequestModel

    role: str
    content: str
    name: str | None = None
    tool_calls: list[MessageCall] | None = Field(default=None, max_length=MAX_TOOLS)
    tool_call_id: str | None = None
    reasoning_content: str | None = None  # the thoughts before an answer of the assistant
    reasoning: str | None = None  # another name of the same, not kept

    @model_validator(mode="before")
    @classmethod
    def _known_fields(cls, message: object) -> object:
        if not isinstance(message, dict):
            raise PydanticCustomError("message", "a message must be an object with 'role' and 'content'")
        fields = sort_fields(cls, message, "messages[].")
        if fields.get("tool_calls") == []:
            del fields["tool_calls"]
        role = fields.get("role")
        if "tool_calls" in fields and role != "assistant":
            raise PydanticCustomError("calls", "'tool_calls' belong to messages of the assistant")
        if "tool_call_id" in fields and role != "tool":
            raise PydanticCustomError("calls", "'tool_call_id' belongs to messages of the role 'tool'")
        if role == "tool" and "tool_call_id" not in fields:
            raise PydanticCustomError("calls", "a message of the role 'tool' needs a 'tool_call_id'")
        thoughts = [fields.pop(name) for name in ("reasoning_content", "reasoning") if name in fields]
        if thoughts and role == "assistant":
            fields["reasoning_content"] = thoughts[0]
        if role == "assistant" and (
            "content" in message or fields.keys() & {"tool_calls", "reasoning_content"}
        ):
            fields.setdefault("content", "")  # null: an empty answer, as OpenAI's clients send it back
        return fields

    @field_validator("role")
    @classmethod
    def _known_role(cls, role: str) -> str:
        if role == "function":
            raise PydanticCustomError("role", "messages of functions are not supported: use the role 'tool'")
        if role not in _ROLES:
            raise PydanticCustomError(
                "role", "the role must be 'system', 'developer', 'user', 'assistant' or 'tool'"
            )
        return "system" if role == "developer" else role

    @field_validator("content", mode="before")
    @classmethod
    def _join_parts(cls, content: object) -> object:
        if not isinstance(content, list):
            return content
        texts = []
        for part in content:
            kind = part.get("type") if isinstance(part, dict) else None
            if not isinstance(part, dict) or not isinstance(kind, str):
                raise PydanticCustomError("part", 'a content part must be {"type": "text", "text": ...}')
            if kind != "text":
                raise PydanticCustomError("part", f"parts of type '{kind[:40]}' are not supported: text only")
            if not isinstance(part.get("text"), str):
                raise PydanticCustomError("part", "a text part needs a string 'text'")
            texts.append(part["text"])
        return "\n".join(texts)

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates take it: the arguments of its calls are objects."""
        fields = self.model_dump(exclude_none=True)
        for given, call in zip(fields.get("tool_calls", ()), self.tool_calls or (), strict=True):
            given["function"]["arguments"] = call.function.parsed
        return fields


def _few_enough(messages: object) -> object:
    # Before the items are looked at: validating a million of them would hold up every stream.
    if isinstance(messages, list) and len(messages) > MAX_MESSAGES:
        raise PydanticCustomError("messages", f"at most {MAX_MESSAGES} messages are possible")
    return messages


Messages = Annotated[list[Message], FailFast(), Field(min_length=1), BeforeValidator(_few_enough)]
