"""POST /v1/messages and /v1/messages/count_tokens: answers in the form of Anthropic's API, whole or as events."""

import uuid
from collections.abc import AsyncGenerator, Iterator
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from serve.anthropic_request import NAMES, MessagesRequest
from serve.arguments import object_of
from serve.chat import prepare, prompt_tokens
from serve.choice import Delta
from serve.errors import APIError, anthropic_body, renamed
from serve.generation import Generation, Serving, respond_with
from serve.parts import Arguments, CallStart, Content, Thought, merged
from serve.protocol import ChatRequest
from serve.stream import named_sse

Event = dict[str, Any]
SIGNATURE = "unsigned"  # of thoughts: without any some clients drop them, and others tell them as the user's


class Answer:
    """The blocks of an answer, from its parts as they come; what is new about them as events."""

    def __init__(self, cut: bool = False) -> None:
        """`cut`: there is less room than `max_tokens`."""
        self._limit = "model_context_window_exceeded" if cut else "max_tokens"
        self.blocks: list[dict[str, Any]] = []
        self.ending: dict[str, Any] = {"stop_reason": None, "stop_sequence": None}
        self._open = False  # the last block still grows
        self._pieces: list[str] = []  # of its text, or arguments

    def feed(self, delta: Delta) -> Iterator[Event]:
        """Events of what has come; all of them must be taken."""
        for part in merged(delta.parts):
            if isinstance(part, CallStart):
                yield from self._begin({"type": "tool_use", "id": part.id, "name": part.name, "input": {}})
            elif isinstance(part, Arguments):
                self._pieces.append(part.text)
                yield self._grown({"type": "input_json_delta", "partial_json": part.text})
            elif part.text:
                yield from self._text(part)
        if delta.finish_reason is not None:
            yield from self._end()
            self.ending = self._ending(delta)

    def _text(self, part: Thought | Content) -> Iterator[Event]:
        kind = "thinking" if isinstance(part, Thought) else "text"
        if not self._open or self.blocks[-1]["type"] != kind:
            more = {"signature": ""} if kind == "thinking" else {}
            yield from self._begin({"type": kind, kind: "", **more})
        text = part.text if self._pieces else part.text[part.gap :]
        self._pieces.append(text)
        yield self._grown({"type": f"{kind}_delta", kind: text})

    def _begin(self, block: dict[str, Any]) -> Iterator[Event]:
        yield from self._end()
        self.blocks.append(block)
        self._open, self._pieces = True, []
        yield {
            "type": "content_block_start",
            "index": len(self.blocks) - 1,
            "content_block": dict(block),
        }

    def _grown(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": len(self.blocks) - 1, "delta": delta}

    def _ending(self, delta: Delta) -> dict[str, Any]:
        sequence = delta.stop_reason if isinstance(delta.stop_reason, str) else None
        reason = "end_turn" if sequence is None else "stop_sequence"
        if delta.finish_reason == "length":
            reason = self._limit
        elif delta.called:
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": sequence if reason == "stop_sequence" else None}

    def _end(self) -> Iterator[Event]:
        if not self._open:
            return
        self._open = False
        block, text = self.blocks[-1], "".join(self._pieces)
        if block["type"] == "tool_use":
            block["input"] = object_of(text) or {}  # clients take nothing else
        else:
            block[block["type"]] = text
        if block["type"] == "thinking":
            block["signature"] = SIGNATURE
            yield self._grown({"type": "signature_delta", "signature": SIGNATURE})
        yield {"type": "content_block_stop", "index": len(self.blocks) - 1}


async def create_message(
    serving: Serving, http_request: Request, asked: tuple[MessagesRequest, ChatRequest]
) -> Response:
    """Answer a conversation."""
    timer = serving.metrics.request_timer()
    request, chat = asked
    model = serving.check_model(chat.model)
    # Its clients ask for as much as large models may say.
    with renamed(NAMES):
        prompt, params = await prepare(serving, http_request, chat, cut=True)
    message_id = f"msg_{uuid.uuid4().hex}"
    says_nothing = request.max_tokens == 0
    generation = Generation(serving, chat, [prompt], params, message_id, timer, says_nothing=says_nothing)
    answer = Answer(cut=params[0].max_tokens < request.max_tokens)
    head = {"id": message_id, "type": "message", "role": "assistant", "model": model}

    def whole(delta: Delta) -> dict[str, Any]:
        for _ in answer.feed(delta):
            pass
        return head | {"content": answer.blocks, **answer.ending, "usage": _usage(generation)}

    events = partial(_events, generation, answer, head)
    headers = {"request-id": message_id}
    return await respond_with(http_request, generation, events, whole, headers, stream=chat.stream)


async def count_tokens(serving: Serving, http_request: Request, chat: ChatRequest) -> Response:
    """How many tokens the prompt of a conversation has."""
    return JSONResponse({"input_tokens": await prompt_tokens(serving, http_request, chat)})


def _usage(generation: Generation) -> dict[str, int]:
    """Tokens that were found in the cache are not among the input's, in this form."""
    used = generation.usage()
    cached = used["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": used["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": used["completion_tokens"],
    }


async def _events(generation: Generation, answer: Answer, head: dict[str, Any]) -> AsyncGenerator[bytes]:
    """The server-sent events of a streamed message."""

    nothing: dict[str, Any] = {"content": [], **answer.ending}
    yield named_sse({"type": "message_start", "message": head | nothing | {"usage": _usage(generation)}})
    try:
        while await generation.next_update() is not None:
            if (delta := generation.choices[0].take()) is not None:
                for fields in answer.feed(delta):
                    yield named_sse(fields)
        yield named_sse({"type": "message_delta", "delta": answer.ending, "usage": _usage(generation)})
        yield named_sse({"type": "message_stop"})
    except APIError as error:
        yield named_sse(anthropic_body(error))  # the status line is gone already
