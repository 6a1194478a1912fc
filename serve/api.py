"""The HTTP application: routes, API key, lifetime. `create_app` is all that a caller needs."""

import asyncio
import contextlib
import hmac
import importlib.metadata
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response
from pydantic import BaseModel
from pydantic_core import to_json
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve.anthropic import count_tokens, create_message
from serve.anthropic_request import CountRequest, MessagesRequest
from serve.body import read_request
from serve.chat import create_chat_completion
from serve.completions import create_completion
from serve.errors import ANTHROPIC, APIError, bad_request, install_error_handlers, unavailable
from serve.generation import Serving, TokenNames
from serve.grammar_cache import GrammarCache, Grammars
from serve.metrics import CONTENT_TYPE, Metrics
from serve.prompts import chat_text, check_length, check_token_ids
from serve.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizePromptRequest,
)
from serve.request import EngineProtocol, EngineStats
from serve.responses import count_input_tokens, create_response
from serve.responses_request import ResponsesRequest
from serve.spellings import Spellings
from serve.text import TextTokenizer
from serve.thought_prompt import ThoughtSupport
from serve.tool_prompt import ToolSupport

log = logging.getLogger("tangram.server")

OPEN_ROUTES = frozenset(("/", "/health", "/ping", "/version", "/metrics"))  # need no API key
_JSON_ITEMS = 4096
_PAGE = Path(__file__).parent / "page.html"
_PAGE_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'"


def create_app(
    engine: EngineProtocol,
    tokenizer: TextTokenizer,
    served_model_names: Sequence[str],
    *,
    api_keys: Sequence[str] = (),
    allowed_origins: Sequence[str] = (),
    sampling_defaults: Mapping[str, Any] = MappingProxyType({}),
    max_choices: int = 128,
    max_body_bytes: int = 8 * 2**20,
    stream_interval: int = 1,
    tool_call_parser: str = "auto",
    reasoning_parser: str = "auto",
    grammars: Grammars | None = None,
    spellings: Spellings | None = None,
    engine_pid: int | None = None,
) -> FastAPI:
    """The application for one engine.

    Args:
      engine: must be usable from any thread; it may still be warming up (`ready`).
      tokenizer: of the served model.
      served_model_names: names that requests may give; the first one is the default.
      api_keys: where given, one of them must come as `Authorization: Bearer KEY` or `x-api-key: KEY`, except on
        OPEN_ROUTES.
      allowed_origins: web pages of these origins may call the API from a browser; "*" is any.
      sampling_defaults: of fields that a request leaves out, e.g. {"temperature": 0.6}.
      max_choices: prompts times `n` of one request.
      max_body_bytes: larger bodies get a 413.
      stream_interval: tokens of a stream that are sent together, but for each choice's first one.
      tool_call_parser: how the model writes calls of tools, one of `serve.tool_formats.PARSERS`.
      reasoning_parser: whether it writes thoughts, one of `serve.thought_prompt.PARSERS`.
      grammars: where they are compiled; None: in this process.
      spellings: of earlier turns; None: this application's own.
      engine_pid: of the engine's process, which /metrics tells of; None: this one.
    """
    if not served_model_names:
        raise ValueError("served_model_names is empty: give at least one name")
    # Calls and thoughts in the format harmony are read together: one of them says that it is there.
    if reasoning_parser == "harmony" and tool_call_parser == "auto":
        tool_call_parser = "harmony"
    tools = ToolSupport.of(tokenizer, tool_call_parser)
    serving = Serving(
        engine=engine,
        tokenizer=tokenizer,
        model_names=tuple(served_model_names),
        max_choices=max_choices,
        max_body_bytes=max_body_bytes,
        stream_interval=stream_interval,
        metrics=Metrics(engine, served_model_names[0], engine_pid),
        executor=ThreadPoolExecutor(4, "tokenize"),
        large_executor=ThreadPoolExecutor(1, "tokenize-large"),
        grammars=grammars or GrammarCache(tokenizer, engine.vocab_size, engine.eos_token_ids),
        spellings=spellings or Spellings(),
        tools=tools,
        thoughts=ThoughtSupport.of(tokenizer, reasoning_parser, harmony=tools.harmony),
    )

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        serving.draining.close()
        serving.grammars.close()
        for executor in (serving.executor, serving.large_executor):
            executor.shutdown(wait=False, cancel_futures=True)

    app = FastAPI(title="Tangram-JAX", version=_version(), lifespan=lifespan, redirect_slashes=False)
    app.state.serving = serving
    install_error_handlers(app)
    _add_generation_routes(app, serving, sampling_defaults)
    _add_tokenizer_routes(app, serving)
    _add_info_routes(app, serving)
    app.add_middleware(_Gate, serving=serving, api_keys=tuple(api_keys))
    if allowed_origins:  # outermost: it answers a browser's question about a request, which brings no key
        app.add_middleware(
            CORSMiddleware, allow_origins=list(allowed_origins), allow_methods=["*"], allow_headers=["*"]
        )
    return app


def _version() -> str:
    try:
        return importlib.metadata.version("tangram-jax")
    except importlib.metadata.PackageNotFoundError:
        return "0.0.0+unknown"


class _Gate:
    """Checks the API key before a body is read, and counts responses. Plain ASGI, so that streams pass untouched."""

    def __init__(self, app: ASGIApp, serving: Serving, api_keys: tuple[str, ...]) -> None:
        self._app = app
        self._metrics = serving.metrics
        self._keys = [key.encode() for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        started = False

        async def counting_send(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                route = getattr(scope.get("route"), "path", "other")
                self._metrics.count_response(route, message["status"])
            await send(message)

        if self._keys and scope["path"] not in OPEN_ROUTES and not self._allowed(scope):
            error = APIError(
                401,
                "Wrong or missing API key: send the header 'Authorization: Bearer YOUR_KEY'.",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
            await error.response(scope)(scope, receive, counting_send)
            return
        try:
            await self._app(scope, receive, counting_send)
        except ClientDisconnect:  # nobody is left to answer
            pass
        except asyncio.CancelledError:
            # The server stops, and has waited long enough for a body or a slow reader.
            if not started:
                late = unavailable("The server is shutting down.")
                await late.response(scope)(scope, receive, counting_send)
        except Exception as error:
            if started:
                raise
            # Here it is counted, and the connection lives on.
            log.exception("%s %s failed", scope["method"], scope["path"][:200])
            bug = APIError(500, f"Internal server error ({type(error).__name__})")
            await bug.response(scope)(scope, receive, counting_send)

    def _allowed(self, scope: Scope) -> bool:
        headers = dict(scope["headers"])
        scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer":
            token = headers.get(b"x-api-key", b"")  # as Anthropic's clients send it
        # Compare with all keys, in constant time, so that timing says nothing about them.
        matches = [hmac.compare_digest(token.strip(), key) for key in self._keys]
        return any(matches)


def _body_schema(*models: type[BaseModel]) -> dict[str, Any]:
    """For /docs: the bodies are read by hand (size limit, worker thread), so FastAPI does not know them."""
    schemas = []
    for model in models:
        schema = model.model_json_schema()
        definitions = schema.pop("$defs", {})
        schemas.append(_inline(schema, definitions))
    body = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": body}}}}


def _inline(schema: Any, definitions: dict[str, Any]) -> Any:
    """The schema with its references replaced by what they stand for (none is recursive)."""
    if isinstance(schema, list):
        return [_inline(item, definitions) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inline(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    return {key: _inline(value, definitions) for key, value in schema.items()}


def _add_generation_routes(app: FastAPI, serving: Serving, defaults: Mapping[str, Any]) -> None:
    @app.post("/v1/chat/completions", openapi_extra=_body_schema(ChatRequest))
    async def chat_completions(request: Request) -> Response:
        body = await read_request(serving, request, partial(ChatRequest.parse, defaults=defaults))
        return await create_chat_completion(serving, request, body)

    @app.post("/v1/responses", openapi_extra=_body_schema(ResponsesRequest))
    async def responses(request: Request) -> Response:
        body = await read_request(serving, request, partial(ResponsesRequest.parse_chat, defaults=defaults))
        return await create_response(serving, request, body)

    @app.post("/v1/responses/input_tokens", openapi_extra=_body_schema(ResponsesRequest))
    async def response_tokens(request: Request) -> Response:
        body = await read_request(serving, request, partial(ResponsesRequest.parse_chat, defaults=defaults))
        return await count_input_tokens(serving, request, body)

    @app.post(ANTHROPIC, openapi_extra=_body_schema(MessagesRequest))
    async def messages(request: Request) -> Response:
        body = await read_request(serving, request, partial(MessagesRequest.parse_chat, defaults=defaults))
        return await create_message(serving, request, body)

    @app.post(f"{ANTHROPIC}/count_tokens", openapi_extra=_body_schema(CountRequest))
    async def messages_tokens(request: Request) -> Response:
        return await count_tokens(
            serving, request, await read_request(serving, request, CountRequest.parse_chat)
        )

    @app.post("/v1/completions", openapi_extra=_body_schema(CompletionRequest))
    async def completions(request: Request) -> Response:
        body = await read_request(serving, request, partial(CompletionRequest.parse, defaults=defaults))
        return await create_completion(serving, request, body)


def _parse_tokenize(body: Any) -> TokenizePromptRequest | TokenizeChatRequest:
    if isinstance(body, dict):
        prompt, chat = (body.get(name) is not None for name in ("prompt", "messages"))
        if prompt == chat:
            code = "invalid_value" if chat else "missing_required_parameter"
            raise bad_request("Give either 'prompt' or 'messages'.", "prompt", code)
        if chat:
            return TokenizeChatRequest.parse(body)
    return TokenizePromptRequest.parse(body)


def _json_list(items: Sequence[Any]) -> bytes:
    """It in JSON, part by part: the event loop waits while one is made."""
    parts = (to_json(items[i : i + _JSON_ITEMS])[1:-1] for i in range(0, len(items), _JSON_ITEMS))
    return b"[" + b",".join(parts) + b"]"


def _add_tokenizer_routes(app: FastAPI, serving: Serving) -> None:
    tokenizer = serving.tokenizer

    # Answers are rendered in the thread as well: they may have millions of tokens.

    def tokenize_now(body: TokenizePromptRequest | TokenizeChatRequest) -> Response:
        limit = serving.engine.max_model_len
        if isinstance(body, TokenizePromptRequest):
            text, param = body.prompt, "prompt"
        else:
            text, param = chat_text(serving.tools, body), "messages"
        check_length(text, limit, param)
        ids = tokenizer.encode(text, add_special_tokens=body.add_special_tokens)
        names = TokenNames(tokenizer, as_ids=False)
        texts = _json_list([names.text(i) for i in ids]) if body.return_token_strs else b"null"
        head = to_json({"count": len(ids), "max_model_len": limit})[:-1]
        answer = head + b',"tokens":' + _json_list(ids) + b',"token_strs":' + texts + b"}"
        return Response(answer, media_type="application/json")

    def detokenize_now(tokens: Any) -> JSONResponse:
        if not isinstance(tokens, list):
            raise APIError(400, "'tokens' must be a list of token ids.", param="tokens", code="invalid_value")
        ids = check_token_ids(tokens, serving.engine.vocab_size, "tokens")
        return JSONResponse({"prompt": tokenizer.decode(ids, skip_special_tokens=False)})

    @app.post("/tokenize", openapi_extra=_body_schema(TokenizePromptRequest, TokenizeChatRequest))
    async def tokenize(request: Request) -> Response:
        body = await read_request(serving, request, _parse_tokenize)
        serving.check_model(body.model)
        return await serving.in_thread(request, tokenize_now, body)

    @app.post("/detokenize", openapi_extra=_body_schema(DetokenizeRequest))
    async def detokenize(request: Request) -> JSONResponse:
        body = await read_request(serving, request, DetokenizeRequest.parse)
        serving.check_model(body.model)
        return await serving.in_thread(request, detokenize_now, body.tokens)


def _add_info_routes(app: FastAPI, serving: Serving) -> None:
    def card(name: str) -> dict[str, Any]:
        """For OpenAI's clients and for Anthropic's, which ask for it at the same place."""
        return {
            "id": name,
            "object": "model",
            "created": serving.created,
            "owned_by": "tangram-jax",
            "root": serving.model_names[0],
            "parent": None,
            "max_model_len": serving.engine.max_model_len,
            "type": "model",
            "display_name": name,
            "created_at": f"{datetime.fromtimestamp(serving.created, UTC):%Y-%m-%dT%H:%M:%SZ}",
            "lifecycle": "active",
            "max_input_tokens": serving.engine.max_model_len,
        }

    @app.get("/v1/models")
    async def list_models() -> JSONResponse:
        cards = [card(name) for name in serving.model_names]
        ends = {"first_id": cards[0]["id"], "last_id": cards[-1]["id"], "has_more": False}
        return JSONResponse({"object": "list", "data": cards, **ends})

    @app.get("/v1/models/{name:path}")
    async def get_model(name: str) -> JSONResponse:
        return JSONResponse(card(serving.check_model(name)))

    @app.get("/health")
    @app.head("/health", include_in_schema=False)  # as some load balancers ask
    @app.get("/ping")
    @app.head("/ping", include_in_schema=False)
    @app.post("/ping")
    async def health() -> JSONResponse:
        serving.check_ready()
        return JSONResponse({"status": "ok"})

    @app.get("/version")
    async def version() -> JSONResponse:
        return JSONResponse({"version": _version()})

    @app.get("/metrics")
    async def metrics() -> Response:
        stats = serving.engine.stats()
        if not isinstance(stats, EngineStats):
            stats = await stats
        return Response(serving.metrics.expose(stats), media_type=CONTENT_TYPE)

    page = _PAGE.read_text(encoding="utf-8")

    @app.get("/", include_in_schema=False)
    async def chat_page() -> HTMLResponse:
        return HTMLResponse(page, headers={"Content-Security-Policy": _PAGE_POLICY})
