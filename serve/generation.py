"""Runs one completion request, streaming or not; `serve.chat` and `serve.completions` say how it looks as JSON."""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from serve.choice import Choice, Delta
from serve.errors import APIError, unavailable
from serve.grammar import Grammar
from serve.grammar_cache import Grammars
from serve.metrics import Metrics, RequestTimer
from serve.prompts import Prompt
from serve.protocol import ChatRequest, CompletionRequest, SamplingRequest
from serve.request import EngineProtocol, GenerationRequest, SamplingParams, TokenOutput
from serve.spellings import Spellings
from serve.stream import (
    DONE,
    Arrival,
    EventStream,
    OutputHub,
    Submission,
    json_bytes,
    sse,
    unless_disconnected,
)
from serve.structured import GrammarSpec
from serve.text import TextTokenizer
from serve.thought_prompt import ThoughtSupport
from serve.tool_prompt import ToolSupport

_LARGE_BODY = 2**18  # bytes; more text may take a thread for seconds
_WHOLE = 8  # tokens that the event loop gets together where nobody sees them before the end


class Draining:
    """The generations under way, and whether the server is about to stop."""

    def __init__(self) -> None:
        self.started = False
        self.generations: set[Generation] = set()

    def interrupt(self) -> None:
        """End all streams with an error event, all other generations with a 503."""
        for generation in self.generations:
            generation.interrupt()

    def close(self) -> None:
        """Abort in the engine what still runs, at the very end."""
        for generation in list(self.generations):
            generation.close()


@dataclass(frozen=True)
class Serving:
    """What all handlers share."""

    engine: EngineProtocol
    tokenizer: TextTokenizer
    model_names: tuple[str, ...]
    max_choices: int
    max_body_bytes: int
    stream_interval: int
    metrics: Metrics
    executor: ThreadPoolExecutor  # tokenizing and other work that would hold up the event loop
    large_executor: ThreadPoolExecutor  # the same for large bodies, so that small ones never wait for them
    grammars: Grammars
    spellings: Spellings
    tools: ToolSupport
    thoughts: ThoughtSupport
    hub: OutputHub = field(default_factory=OutputHub)
    draining: Draining = field(default_factory=Draining)
    created: int = field(default_factory=lambda: int(time.time()))

    def check_model(self, name: str | None) -> str:
        """The model's name for the response; 404 for one that is not served here."""
        if name is None:
            return self.model_names[0]
        if name not in self.model_names:
            served = ", ".join(f"'{known}'" for known in self.model_names)
            raise APIError(
                404,
                f"The model '{name[:200]}' does not exist here. Served: {served}.",
                param="model",
                code="model_not_found",
            )
        return name

    def check_ready(self) -> None:
        """503 while the engine warms up, when it died, and when the server is about to stop."""
        if self.draining.started:
            raise unavailable("The server is shutting down.")
        if not self.engine.ready:
            raise unavailable("The engine is not ready: it is still warming up, or it has stopped.")

    async def grammar_of(self, http_request: Request, spec: GrammarSpec | None) -> Grammar | None:
        """What an answer of this form must follow, if one is asked for; raises APIError, and ClientDisconnect as below."""
        if spec is None:
            return None
        return await unless_disconnected(http_request.receive, self.grammars.get(spec))

    async def in_thread[**P, T](
        self, http_request: Request, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run slow work on a body of `read_request` beside the event loop; ClientDisconnect where nobody waits for it."""
        executor = self.large_executor if http_request.state.body_bytes > _LARGE_BODY else self.executor
        work = asyncio.get_running_loop().run_in_executor(executor, lambda: function(*args, **kwargs))
        return await unless_disconnected(http_request.receive, work)


class Format(Protocol):
    """How the choices of one kind of completion look as JSON."""

    id_prefix: str
    object_name: str
    chunk_object_name: str

    def choice(self, index: int, delta: Delta, prompt: Prompt) -> dict[str, Any]:
        """A whole choice."""

    def opening(self, index: int) -> dict[str, Any] | None:
        """A chunk that comes before the first text of a choice."""

    def chunks(self, index: int, delta: Delta, prompt: Prompt) -> Sequence[dict[str, Any]]:
        """A part of a choice, in one chunk or several."""

    def response_extras(self, prompts: Sequence[Prompt]) -> dict[str, Any]:
        """Further fields of a whole response, and of what opens a choice."""


class TokenNames:
    """Texts of tokens in log-probabilities."""

    def __init__(self, tokenizer: TextTokenizer, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def text(self, token_id: int) -> str:
        """The token's text, or `token_id:N`; incomplete UTF-8 shows as U+FFFD."""
        return f"token_id:{token_id}" if self._as_ids else self.raw(token_id).decode("utf-8", "replace")

    def raw(self, token_id: int) -> bytes:
        return self._tokenizer.token_bytes(token_id)


class Generation:
    """All choices of one HTTP request, from the engine's outputs to deltas."""

    def __init__(
        self,
        serving: Serving,
        request: SamplingRequest,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        request_id: str,
        timer: RequestTimer,
        *,
        says_nothing: bool = False,
    ) -> None:
        """`says_nothing`: what is generated is dropped, as in a completion of no tokens: the engine always generates."""
        completion = request if isinstance(request, CompletionRequest) else None
        chat = request if isinstance(request, ChatRequest) else None
        self._counts_thoughts = chat is not None and serving.thoughts.on
        self._n = request.n
        self._prompts = prompts
        self._echo = completion is not None and completion.echo
        self._timer = timer
        self._cached = [0] * len(prompts)
        self._started = [False] * len(prompts)
        self._echo_scores = self._echo and completion is not None and completion.logprobs is not None
        self._early: list[list[Arrival]] = [
            [] for _ in prompts
        ]  # came before choice 0, where it must be first
        self.choices = [
            Choice(
                serving.tokenizer,
                params[p],
                stops=request.stop,
                include_stop=request.include_stop_str_in_output,
                skip_special_tokens=request.skip_special_tokens,
                drop_generated=says_nothing or (completion is not None and completion.max_tokens == 0),
                reader=serving.tools.reader(chat, prompt.beginning, serving.thoughts) if chat else None,
            )
            for p, prompt in enumerate(prompts)
            for _ in range(request.n)
        ]
        continues = chat.continue_final_message if chat else not self._echo
        # A grammar sees the first token's leading space, so that it belongs to the text.
        by_grammar = params[0].grammar is not None and not self._echo
        if continues or by_grammar:
            for index, choice in enumerate(self.choices):
                choice.continue_text(self.prompt_of(index).ids, whole=by_grammar)
        requests = [
            GenerationRequest(
                request_id=request_id if len(prompts) == 1 else f"{request_id}-{p}",
                prompt_ids=prompt.ids,
                sampling=params[p],
                n=request.n,
                retention=request.kv_retention,
            )
            for p, prompt in enumerate(prompts)
        ]
        form = request.grammar_spec.param if request.grammar_spec else "tools"  # of calls that must be
        # By what its text says: it is looked at as it comes.
        ends_early = request.stop or (chat is not None and (chat.tools or serving.tools.harmony))
        interval = max(serving.stream_interval, 1 if request.stream or ends_early else _WHOLE)
        self._submission = Submission(serving.engine, serving.hub, requests, form, interval)
        self._draining, self._metrics, self._grammar = serving.draining, serving.metrics, params[0].grammar
        plain = chat is not None and not chat.add_special_tokens
        self._spellings = serving.spellings if plain else None

    async def submit(self, http_request: Request) -> None:
        """Hand the prompts to the engine; raises APIError, and ClientDisconnect where a grammar takes its time."""
        self._draining.generations.add(self)
        try:
            submitting = self._submission.submit()
            await (unless_disconnected(http_request.receive, submitting) if self._grammar else submitting)
        except BaseException:
            self.close()
            raise
        if self._grammar:
            self._metrics.count_grammar(self._grammar.kind)

    def interrupt(self) -> None:
        """End it with an error that says that the server stops."""
        self._submission.interrupt()

    def close(self) -> None:
        """Abort what still runs; idempotent."""
        self._submission.close()
        self._draining.generations.discard(self)

    def prompt_of(self, index: int) -> Prompt:
        """The prompt of a choice."""
        return self._prompts[index // self._n]

    async def next_update(self) -> list[int] | None:
        """Wait for outputs; indices of the choices that got some. None when all choices are finished."""
        if not self._submission.running:
            self._timer.finished(sum(len(prompt.ids) for prompt in self._prompts))
            return None
        changed: dict[int, None] = {}
        for now, p, output in await self._submission.take():
            if not self._started[p]:
                if self._echo_scores and output.choice != 0:
                    self._early[p].append((now, p, output))
                    continue
                await self._start(p, output)
                for early in self._early[p]:
                    changed[self._feed(*early)] = None
            changed[self._feed(now, p, output)] = None
        return list(changed)

    async def _start(self, p: int, output: TokenOutput) -> None:
        """The first output of choice 0 brings the prompt's log-probabilities, which stand before all choices."""
        self._started[p] = True
        if self._echo:
            for choice in self.choices[p * self._n : (p + 1) * self._n]:
                choice.echo(self._prompts[p].text, self._prompts[p].ids, output.prompt_logprobs)
                await asyncio.sleep(0)  # a long prompt has taken milliseconds: let the streams go on

    def _feed(self, now: float, p: int, output: TokenOutput) -> int:
        """Hand an output to its choice; the choice's index."""
        index = p * self._n + output.choice
        choice = self.choices[index]
        if choice.finished:
            return index
        if output.choice == 0 and output.cached_tokens:  # the other choices fork from the first one
            self._cached[p] = output.cached_tokens
        if output.token_id is not None:
            self._timer.token(p, output.choice, now)
        if choice.feed(output):
            self._submission.stop(p, output.choice)
        if choice.finish_reason is not None:
            self._timer.choice_finished(choice.finish_reason, choice.num_tokens)
            prompt = self._prompts[p]
            if self._spellings and prompt.text is not None and (spelling := choice.spelling):
                self._spellings.remember(prompt.text + spelling[0], prompt.ids + spelling[1])
        return index

    async def complete(self, http_request: Request) -> list[Delta]:
        """Every choice as one delta; it is closed then, and as soon as the client goes away."""
        try:
            return await unless_disconnected(http_request.receive, self._complete())
        finally:
            self.close()

    async def _complete(self) -> list[Delta]:
        while await self.next_update() is not None:
            pass
        return [choice.take(everything=True) or Delta() for choice in self.choices]

    def usage(self) -> dict[str, Any]:
        """Token counts so far, in OpenAI's shape; a prompt counts once, whatever its number of choices."""
        prompt_tokens = sum(len(prompt.ids) for prompt in self._prompts)
        completion_tokens = sum(choice.num_tokens for choice in self.choices)
        usage = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached)},
        }
        if self._counts_thoughts:
            thoughts = sum(choice.reasoning_tokens for choice in self.choices)
            usage["completion_tokens_details"] = {"reasoning_tokens": thoughts}
        return usage


async def respond_with(
    http_request: Request,
    generation: Generation,
    events: Callable[[], AsyncGenerator[bytes]],
    whole: Callable[[Delta], dict[str, Any]],
    headers: dict[str, str],
    *,
    stream: bool,
) -> Response:
    """Generate one choice and answer with its events, or with the object that `whole` makes of it."""
    await generation.submit(http_request)
    if stream:
        return EventStream(events(), generation.close, headers)
    (delta,) = await generation.complete(http_request)
    return Response(json_bytes(whole(delta)), media_type="application/json", headers=headers)


async def respond(
    serving: Serving,
    http_request: Request,
    request: SamplingRequest,
    model: str,
    prompts: Sequence[Prompt],
    params: Sequence[SamplingParams],
    form: Format,
    timer: RequestTimer,
) -> Response:
    """Generate and answer, as one JSON object or as server-sent events."""
    request_id = f"{form.id_prefix}{uuid.uuid4().hex}"
    generation = Generation(serving, request, prompts, params, request_id, timer)
    head = {"id": request_id, "created": int(time.time()), "model": model}
    headers = {"x-request-id": request_id}
    await generation.submit(http_request)
    if request.stream:
        events = _events(generation, request, form, head | {"object": form.chunk_object_name})
        return EventStream(events, generation.close, headers)
    choices = []
    for i, delta in enumerate(await generation.complete(http_request)):
        choices.append(to_json(form.choice(i, delta, generation.prompt_of(i))))
        await asyncio.sleep(0)  # a choice may hold thousands of log-probabilities: let the streams go on
    rest = head | {
        "object": form.object_name,
        "system_fingerprint": None,
        "usage": generation.usage(),
        **form.response_extras(prompts),
    }
    body = to_json(rest)[:-1] + b',"choices":[' + b",".join(choices) + b"]}"
    return Response(body, media_type="application/json", headers=headers)


async def _events(
    generation: Generation, request: SamplingRequest, form: Format, head: dict[str, Any]
) -> AsyncGenerator[bytes]:
    """The server-sent events of a streamed completion, the usage chunk and [DONE] included."""
    options = request.stream_options
    running_usage = options is not None and options.continuous_usage_stats
    final_usage = options is not None and options.include_usage
    opened: set[int] = set()

    def event(choice: dict[str, Any], **rest: Any) -> bytes:
        if running_usage:
            rest["usage"] = generation.usage()
        elif final_usage:
            rest["usage"] = None
        return sse({**head, "choices": [choice], **rest})

    try:
        while (changed := await generation.next_update()) is not None:
            for index in changed:
                if index not in opened:
                    opened.add(index)
                    opening = form.opening(index)
                    if opening is not None:
                        yield event(opening, **form.response_extras([generation.prompt_of(index)]))
                delta = generation.choices[index].take()
                if delta is not None:
                    for chunk in form.chunks(index, delta, generation.prompt_of(index)):
                        yield event(chunk)
        if final_usage:
            yield sse({**head, "choices": [], "usage": generation.usage()})
    except APIError as error:
        # The status line is gone already: clients of OpenAI's API look for "error" in an event.
        yield sse(error.body())
    yield DONE
