"""POST /v1/responses: an answer as a list of items, thoughts, text and calls, whole or as events."""

import time
import uuid
from collections import deque
from collections.abc import AsyncGenerator, Iterator
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from serve.chat import ChatFormat, prepare, prompt_tokens
from serve.choice import Delta, TokenLogprob
from serve.errors import APIError, renamed
from serve.generation import Generation, Serving, TokenNames, respond_with
from serve.parts import Arguments, CallStart, Content, Thought, merged
from serve.protocol import ChatRequest
from serve.responses_request import CHAT_NAMES, ResponsesRequest, echoed
from serve.stream import named_sse
from serve.truncation import prepare_truncated

Event = dict[str, Any]


class Answer:
    """The items of an answer, from its parts as they come; what is new about them as events."""

    def __init__(self, form: ChatFormat | None) -> None:
        """`form`: how log-probabilities look, if they are wanted."""
        self.items: list[dict[str, Any]] = []
        self._form = form
        self._open = False  # the last item still grows
        self._pieces: list[str] = []  # of its text, or arguments
        self._content = 0  # characters of all text
        self._logprobs: deque[tuple[int, TokenLogprob]] = deque()  # of text that is still to come

    def feed(self, delta: Delta) -> Iterator[Event]:
        """Events of what has come; all of them must be taken."""
        self._logprobs += delta.content_logprobs
        for part in merged(delta.parts):
            if isinstance(part, CallStart):
                call = {"call_id": part.id, "name": part.name, "arguments": ""}
                yield from self._begin("function_call", "fc", **call)
            elif isinstance(part, Arguments):
                self._pieces.append(part.text)
                yield self._event("response.function_call_arguments.delta", delta=part.text)
            elif part.text:
                yield from self._text(part)
        if delta.finish_reason is None:
            return
        if not self.items:  # an empty answer is one, too
            yield from self._begin("message", "msg", role="assistant", content=[])
        yield from self.end("incomplete" if delta.finish_reason == "length" else "completed")

    def _text(self, part: Thought | Content) -> Iterator[Event]:
        thought = isinstance(part, Thought)
        if not self._open or self.items[-1]["type"] != ("reasoning" if thought else "message"):
            if thought:
                yield from self._begin("reasoning", "rs", summary=[], content=[])
            else:
                yield from self._begin("message", "msg", role="assistant", content=[])
        item = self.items[-1]
        if not item["content"]:
            item["content"].append(_empty_part(item["type"]))
            yield self._event("response.content_part.added", content_index=0, part=_empty_part(item["type"]))
        text = part.text if self._pieces else part.text[part.gap :]
        self._pieces.append(text)
        if isinstance(part, Thought):
            yield self._event("response.reasoning_text.delta", content_index=0, delta=text)
        else:
            logprobs = self._logprobs_of(part)
            item["content"][0]["logprobs"] += logprobs
            yield self._event("response.output_text.delta", content_index=0, delta=text, logprobs=logprobs)

    def _logprobs_of(self, part: Content) -> list[dict[str, Any]]:
        """Of the tokens of the next text."""
        self._content += len(part.text)
        entries = []
        while self._logprobs and self._logprobs[0][0] <= self._content:
            entries.append(self._logprobs.popleft()[1])
        return self._form.logprobs(entries) if self._form else []

    def _begin(self, kind: str, prefix: str, **fields: Any) -> Iterator[Event]:
        yield from self.end("completed")
        item = {"type": kind, "id": f"{prefix}_{uuid.uuid4().hex}", "status": "in_progress", **fields}
        self.items.append(item)
        self._open, self._pieces = True, []
        yield {"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": _copy(item)}

    def end(self, status: str) -> Iterator[Event]:
        """Events of the end of the last item, if it still grows."""
        if not self._open:
            return
        self._open = False
        item, text = self.items[-1], "".join(self._pieces)
        item["status"] = status
        if item["type"] == "function_call":
            item["arguments"] = text
            yield self._event(
                "response.function_call_arguments.done", name=item["name"], arguments=item["arguments"]
            )
        for part in item.get("content", ()):
            part["text"] = text
            if item["type"] == "reasoning":
                yield self._event("response.reasoning_text.done", content_index=0, text=part["text"])
            else:
                done = {"text": part["text"], "logprobs": part["logprobs"]}
                yield self._event("response.output_text.done", content_index=0, **done)
            yield self._event("response.content_part.done", content_index=0, part=part)
        yield {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": item}

    def _event(self, kind: str, **fields: Any) -> Event:
        """Of the last item."""
        return {"type": kind, "item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, **fields}


def _empty_part(kind: str) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": ""}
    return {"type": "output_text", "text": "", "annotations": [], "logprobs": []}


def _copy(item: dict[str, Any]) -> dict[str, Any]:
    """As it is now: the event is written after it has grown."""
    return {key: list(value) if isinstance(value, list) else value for key, value in item.items()}


async def create_response(
    serving: Serving, http_request: Request, asked: tuple[ResponsesRequest, ChatRequest]
) -> Response:
    """Answer a conversation; nothing of it is stored under the response's name."""
    timer = serving.metrics.request_timer()
    request, chat = asked
    model = serving.check_model(chat.model)
    prepared = prepare_truncated if request.truncation == "auto" else prepare
    with renamed(CHAT_NAMES):
        prompt, params = await prepared(serving, http_request, chat)
    response_id = f"resp_{uuid.uuid4().hex}"
    generation = Generation(serving, chat, [prompt], params, response_id, timer)
    head = {"id": response_id, "object": "response", "created_at": int(time.time()), "model": model}
    head |= echoed(request, chat)
    form = ChatFormat(chat, TokenNames(serving.tokenizer, as_ids=False)) if request.logprobs else None
    answer = Answer(form)

    def whole(delta: Delta) -> dict[str, Any]:
        for _ in answer.feed(delta):
            pass
        return _whole(head, answer, generation, delta.finish_reason)

    events = partial(_events, generation, answer, head)
    headers = {"x-request-id": response_id}
    with renamed(CHAT_NAMES):
        return await respond_with(http_request, generation, events, whole, headers, stream=chat.stream)


async def count_input_tokens(
    serving: Serving, http_request: Request, asked: tuple[ResponsesRequest, ChatRequest]
) -> Response:
    """How many tokens a response would have as its input."""
    with renamed(CHAT_NAMES):
        count = await prompt_tokens(serving, http_request, asked[1])
    return JSONResponse({"object": "response.input_tokens", "input_tokens": count})


def _whole(
    head: dict[str, Any], answer: Answer, generation: Generation, finish_reason: str | None
) -> dict[str, Any]:
    """The response at its end."""
    used = generation.usage()
    thoughts = used.get("completion_tokens_details", {}).get("reasoning_tokens", 0)
    cut = finish_reason == "length"
    return head | {
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "error": None,
        "completed_at": int(time.time()),
        "output": answer.items,
        "usage": {
            "input_tokens": used["prompt_tokens"],
            "input_tokens_details": used["prompt_tokens_details"],
            "output_tokens": used["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": thoughts},
            "total_tokens": used["total_tokens"],
        },
    }


async def _events(generation: Generation, answer: Answer, head: dict[str, Any]) -> AsyncGenerator[bytes]:
    """The server-sent events of a streamed response, numbered."""
    number = 0
    begun: dict[str, Any] = {"incomplete_details": None, "error": None, "output": [], "usage": None}

    def event(fields: Event) -> bytes:
        nonlocal number
        number += 1
        return named_sse({"sequence_number": number - 1, **fields})

    for kind in ("created", "in_progress"):
        response = head | begun | {"status": "in_progress"}
        yield event({"type": f"response.{kind}", "response": response})
    finish_reason: str | None = None
    try:
        while await generation.next_update() is not None:
            delta = generation.choices[0].take()
            if delta is None:
                continue
            finish_reason = delta.finish_reason
            for fields in answer.feed(delta):
                yield event(fields)
        response = _whole(head, answer, generation, finish_reason)
        yield event({"type": f"response.{response['status']}", "response": response})
    except APIError as error:
        # The status line is gone already.
        for _ in answer.end("incomplete"):
            pass
        code = "server_error" if error.status >= 500 else error.code
        fault = {"code": code, "message": error.message}
        response = head | begun | {"status": "failed", "error": fault, "output": answer.items}
        yield event({"type": "response.failed", "response": response})
