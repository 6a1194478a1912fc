"""POST /v1/completions."""

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from serve.choice import Delta, TokenLogprob, chosen_logprob, finite_logprob
from serve.generation import Serving, TokenNames, respond
from serve.prompts import Prompt, completion_prompts, sampling_params
from serve.protocol import CompletionRequest


class CompletionFormat:
    """Text completions as JSON."""

    id_prefix = "cmpl-"
    object_name = "text_completion"
    chunk_object_name = "text_completion"

    def __init__(self, request: CompletionRequest, names: TokenNames) -> None:
        self._names = names
        self._num_top = request.logprobs
        self._token_ids = request.return_token_ids
        self._begun: set[int] = set()

    def choice(self, index: int, delta: Delta, prompt: Prompt) -> dict[str, Any]:
        choice = self._choice(index, delta)
        if self._token_ids and index not in self._begun:
            self._begun.add(index)
            choice["prompt_token_ids"] = prompt.ids
        return choice

    def opening(self, index: int) -> None:
        return None

    def chunks(self, index: int, delta: Delta, prompt: Prompt) -> list[dict[str, Any]]:
        return [self.choice(index, delta, prompt)]  # the first has the prompt's ids

    def _choice(self, index: int, delta: Delta) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": index,
            "text": delta.text,
            "logprobs": None if self._num_top is None else self._logprob_lists(delta.logprobs, self._num_top),
            "finish_reason": delta.finish_reason,
        }
        if delta.finish_reason is not None:
            choice["stop_reason"] = delta.stop_reason
        if self._token_ids:
            choice["token_ids"] = delta.token_ids
        return choice

    def response_extras(self, prompts: Sequence[Prompt]) -> dict[str, Any]:
        return {}

    def _logprob_lists(self, entries: Sequence[TokenLogprob], num_top: int) -> dict[str, Any]:
        return {
            "text_offset": [entry.offset for entry in entries],
            "tokens": [self._names.text(entry.token_id) for entry in entries],
            "token_logprobs": [None if entry.logprob is None else chosen_logprob(entry) for entry in entries],
            "top_logprobs": [self._top(entry, num_top) for entry in entries],
        }

    def _top(self, entry: TokenLogprob, num_top: int) -> dict[str, float] | None:
        """The likeliest tokens and the chosen one; of tokens with the same text the likeliest stays."""
        if entry.logprob is None:
            return None
        top: dict[str, float] = {}
        for token_id, logprob in [*entry.top[:num_top], (entry.token_id, chosen_logprob(entry))]:
            top.setdefault(self._names.text(token_id), finite_logprob(logprob))
        return top


async def create_completion(serving: Serving, http_request: Request, request: CompletionRequest) -> Response:
    """Continue one prompt or several."""
    timer = serving.metrics.request_timer()
    model = serving.check_model(request.model)
    serving.check_ready()
    limit, vocab_size = serving.engine.max_model_len, serving.engine.vocab_size
    prompts = await serving.in_thread(
        http_request, completion_prompts, serving.tokenizer, request, limit, vocab_size, serving.max_choices
    )
    grammar = await serving.grammar_of(http_request, request.grammar_spec)
    params = sampling_params(request, prompts, limit, vocab_size, "prompt", grammar)
    form = CompletionFormat(request, TokenNames(serving.tokenizer, request.return_tokens_as_token_ids))
    return await respond(serving, http_request, request, model, prompts, params, form, timer)
