"""Errors in the shape of OpenAI's API, {"error": {"message", "type", "param", "code"}}, or in that of Anthropic's."""

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import Scope

ANTHROPIC = "/v1/messages"
TOO_LONG = "context_length_exceeded"
NO_THREADS = "thread_unsupported_request"  # the code after which Anthropic's client goes on without a thread
_KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
type Names = Mapping[str, str | Callable[[re.Match[str]], str]]
_CODES = {404: "not_found", 405: "method_not_allowed", 408: "request_timeout", 413: "request_too_large"}


class APIError(Exception):
    """An error that the client is told about, with its HTTP status."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code if code is not None else _CODES.get(status)
        self.headers = dict(headers or {})

    def __reduce__(self) -> tuple[Any, ...]:
        return (
            type(self),
            (self.status, self.message),
            self.__dict__,
        )  # exceptions are pickled without keywords

    def body(self) -> dict[str, Any]:
        """The JSON object that OpenAI's clients parse."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self, scope: Scope) -> JSONResponse:
        """The error as an HTTP response, in the form of the API that is asked: some routes belong to both."""
        named = any(name == b"anthropic-version" for name, _ in scope["headers"])  # its clients always say it
        body = anthropic_body(self) if named or scope["path"].startswith(ANTHROPIC) else self.body()
        return JSONResponse(body, status_code=self.status, headers=self.headers)


def anthropic_body(error: APIError) -> dict[str, Any]:
    """The JSON object that Anthropic's clients parse, of a response or of a stream's last event."""
    kind = _KINDS.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    fault: dict[str, Any] = {"type": kind, "message": error.message}
    if error.code == NO_THREADS:
        fault["details"] = {"error_code": NO_THREADS}
    return {"type": "error", "error": fault}


@contextlib.contextmanager
def renamed(names: Names) -> Iterator[None]:
    """Faults within it have other names of fields: {theirs, as a regular expression: ours, as `re.sub` takes it}."""
    try:
        yield
    except APIError as error:
        raise _renamed(error, names) from None


def _renamed(error: APIError, names: Names) -> APIError:
    message, param = error.message, error.param
    for theirs, ours in names.items():
        message = re.sub(rf"(?<='){theirs}(?=['.\[])", ours, message)
        param = param and re.sub(rf"^{theirs}(?=$|[.\[])", ours, param)
    return APIError(error.status, message, param=param, code=error.code, headers=error.headers)


def bad_request(message: str, param: str | None = None, code: str | None = None) -> APIError:
    """A 400: the request can never work as written."""
    return APIError(400, message, param=param, code=code)


def unavailable(message: str) -> APIError:
    """A 503: the same request may work a little later."""
    return APIError(503, message, code="unavailable", headers={"Retry-After": "1"})


def too_long(limit: int, prompt_tokens: int, param: str, *, at_least: bool = False) -> APIError:
    """The prompt leaves no room for a generated token (`at_least`: counting was stopped early)."""
    count = f"more than {prompt_tokens}" if at_least else str(prompt_tokens)
    # Clients know it by OpenAI's and vLLM's words, or by Anthropic's, "prompt is too long: 9 tokens > 8 maximum".
    return bad_request(
        f"This model's maximum context length is {limit} tokens, prompt and generation together. However, your "
        f"{param} resulted in {count} tokens, so the prompt is too long: {count} tokens > {limit - 1} maximum. Please "
        f"reduce the length of the {param}.",
        param,
        TOO_LONG,
    )


def install_error_handlers(app: FastAPI) -> None:
    """Every error of the app, foreseen or not, leaves in the shape of the API that was asked."""

    @app.exception_handler(APIError)
    async def on_api_error(request: Request, error: APIError) -> JSONResponse:
        return error.response(request.scope)

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> JSONResponse:
        where = f"{request.method} {request.url.path[:200]}"
        known = {404: f"Unknown route: {where}", 405: f"Method not allowed: {where}"}
        message = known.get(error.status_code, str(error.detail))
        return APIError(error.status_code, message, headers=error.headers).response(request.scope)
