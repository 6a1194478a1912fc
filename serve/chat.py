"""POST /v1/chat/completions."""

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from serve.choice import Delta, TokenLogprob, chosen_logprob, finite_logprob
from serve.generation import Serving, TokenNames, respond
from serve.parts import Arguments, CallStart, Content, Part, Thought, merged
from serve.prompts import Prompt, chat_prompt, chat_text, check_length, check_num_choices, sampling_params
from serve.protocol import ChatRequest
from serve.request import SamplingParams


class ChatFormat:
    """Chat completions as JSON."""

    id_prefix = "chatcmpl-"
    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"

    def __init__(self, request: ChatRequest, names: TokenNames, *, thinks: bool = False) -> None:
        """`thinks`: thoughts are looked for."""
        self._names = names
        self._logprobs = request.logprobs
        self._num_top = request.top_logprobs or 0
        self._token_ids = request.return_token_ids
        self._shows_thoughts = thinks and request.include_reasoning

    def choice(self, index: int, delta: Delta, prompt: Prompt) -> dict[str, Any]:
        parts = merged(delta.parts)
        text = "".join(part.text for part in parts if isinstance(part, Content))
        calls = [_call(part) for part in parts if isinstance(part, CallStart)]
        for part in parts:
            if isinstance(part, Arguments):
                calls[part.number]["function"]["arguments"] = part.text
        message: dict[str, Any] = {"role": "assistant", "content": text or None}
        if not (text or calls or delta.thought):
            message["content"] = ""
        if self._shows_thoughts:
            thoughts = "".join(part.text for part in parts if isinstance(part, Thought))
            message["reasoning_content"] = thoughts or None
        if calls:
            message["tool_calls"] = calls
        return self._choice(index, delta, "message", message)

    def opening(self, index: int) -> dict[str, Any]:
        return {
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }

    def chunks(self, index: int, delta: Delta, prompt: Prompt) -> list[dict[str, Any]]:
        # Thoughts, text, or a piece of one call in each chunk: not every client looks for more.
        *before, last = [_piece(part) for part in merged(delta.parts)] or [{}]
        chunks = [self._choice(index, Delta(), "delta", piece) for piece in before]
        return [*chunks, self._choice(index, delta, "delta", last)]

    def response_extras(self, prompts: Sequence[Prompt]) -> dict[str, Any]:
        return {"prompt_token_ids": prompts[0].ids} if self._token_ids else {}

    def _choice(self, index: int, delta: Delta, key: str, message: dict[str, Any]) -> dict[str, Any]:
        called = delta.called and delta.finish_reason == "stop"
        choice: dict[str, Any] = {
            "index": index,
            key: message,
            "logprobs": {"content": self.logprobs(delta.logprobs), "refusal": None}
            if self._logprobs
            else None,
            "finish_reason": "tool_calls" if called else delta.finish_reason,
        }
        if delta.finish_reason is not None:
            choice["stop_reason"] = delta.stop_reason
        if self._token_ids:
            choice["token_ids"] = delta.token_ids
        return choice

    def logprobs(self, entries: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
        """Of each token."""
        return [
            {
                **self._token(entry.token_id, chosen_logprob(entry)),
                "top_logprobs": [
                    self._token(token_id, finite_logprob(logprob))
                    for token_id, logprob in entry.top[: self._num_top]
                ],
            }
            for entry in entries
        ]

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self._names.text(token_id),
            "logprob": logprob,
            "bytes": list(self._names.raw(token_id)),
        }


def _call(start: CallStart) -> dict[str, Any]:
    return {"id": start.id, "type": "function", "function": {"name": start.name, "arguments": ""}}


def _piece(part: Part) -> dict[str, Any]:
    """What a chunk says."""
    if isinstance(part, Thought):
        return {"reasoning_content": part.text}
    if isinstance(part, Content):
        return {"content": part.text}
    if isinstance(part, CallStart):
        return {"tool_calls": [{"index": part.number, **_call(part)}]}
    return {"tool_calls": [{"index": part.number, "function": {"arguments": part.text}}]}


async def create_chat_completion(serving: Serving, http_request: Request, request: ChatRequest) -> Response:
    """Answer a conversation."""
    timer = serving.metrics.request_timer()
    model = serving.check_model(request.model)
    prompt, params = await prepare(serving, http_request, request)
    form = ChatFormat(
        request, TokenNames(serving.tokenizer, request.return_tokens_as_token_ids), thinks=serving.thoughts.on
    )
    return await respond(serving, http_request, request, model, [prompt], params, form, timer)


async def prepare(
    serving: Serving, http_request: Request, request: ChatRequest, *, cut: bool = False
) -> tuple[Prompt, list[SamplingParams]]:
    """The prompt of a conversation, and how its answer is sampled; raises APIError.

    `cut`: what may be generated is at most what there is room for, instead of a 400.
    """
    serving.check_ready()
    limit, vocab_size = serving.engine.max_model_len, serving.engine.vocab_size
    check_num_choices(1, request.n, serving.max_choices)
    prompt = await serving.in_thread(
        http_request,
        chat_prompt,
        serving.tools,
        request,
        limit,
        vocab_size,
        serving.spellings,
        serving.thoughts,
    )
    form_of_answer = serving.thoughts.grammar(serving.tools.grammar(request), prompt.beginning)
    grammar = await serving.grammar_of(http_request, form_of_answer)
    if cut and request.token_limit is not None:
        room = min(request.token_limit, limit - len(prompt.ids))
        request = request.model_copy(update={"max_completion_tokens": room})
    return prompt, sampling_params(request, [prompt], limit, vocab_size, "messages", grammar)


async def prompt_tokens(serving: Serving, http_request: Request, request: ChatRequest) -> int:
    """How many tokens the prompt of a conversation has; raises APIError."""
    serving.check_model(request.model)

    def count() -> int:
        text = chat_text(serving.tools, request)
        check_length(text, serving.engine.max_model_len, "messages")
        return len(serving.tokenizer.encode(text, add_special_tokens=request.add_special_tokens))

    return await serving.in_thread(http_request, count)
