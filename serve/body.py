"""Reading a JSON body from a client that may be careless or hostile."""

import asyncio
from collections.abc import Callable
from typing import Any

import pydantic_core
from starlette.requests import Request

from serve.errors import APIError, bad_request
from serve.generation import Serving

_READ_SECONDS = 30.0  # a body that takes longer is refused, unless it comes at this pace at least:
_LEAST_RATE = 4096  # bytes a second
_DRAIN_SECONDS = 0.5  # how long a body that is too large is still read, so that the client sees the answer
_INLINE_BYTES = 32768  # larger bodies are parsed on a worker thread


async def read_request[T](serving: Serving, request: Request, parse: Callable[[Any], T]) -> T:
    """The validated body; raises APIError (400, 408, 413, 415)."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise APIError(
            415,
            f"Unsupported content type '{kind[:80]}': send the header 'Content-Type: application/json'.",
            code="unsupported_media_type",
        )
    try:
        async with asyncio.timeout(_READ_SECONDS) as deadline:
            data = await _read_bytes(request, serving.max_body_bytes, deadline)
    except TimeoutError:
        raise APIError(
            408,
            f"The request body came too slowly: it may take {_READ_SECONDS:g} seconds, and a second more for every "
            f"{_LEAST_RATE} bytes.",
        ) from None
    request.state.body_bytes = len(data)  # says which threads work on it
    if len(data) <= _INLINE_BYTES:
        return parse(_from_json(data))
    return await serving.in_thread(request, lambda: parse(_from_json(data)))


def _from_json(data: bytes) -> Any:
    try:
        # Refuses NaN, lone surrogates, deep nesting and huge numbers, unlike the json module.
        return pydantic_core.from_json(data, allow_inf_nan=False)
    except ValueError as error:
        raise bad_request(f"The request body is not valid JSON: {error}.", code="invalid_json") from None


async def _read_bytes(request: Request, limit: int, slow: asyncio.Timeout) -> bytes:
    """The body; `slow` is put off as it comes."""
    last = slow.when() or 0.0
    length = request.headers.get("content-length", "0")
    too_large = APIError(413, f"The request body is larger than the {limit} bytes that this server takes.")
    announced = int(length) if length.isdecimal() else 0
    if announced > limit and "expect" in request.headers:
        raise too_large  # the client waits for our word before it sends the body
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(_DRAIN_SECONDS if announced > limit else None) as deadline:
            async for part in request.stream():
                size += len(part)
                if size <= limit:
                    slow.reschedule(last + size / _LEAST_RATE)
                    parts.append(part)
                elif deadline.when() is None:
                    parts.clear()
                    deadline.reschedule(asyncio.get_running_loop().time() + _DRAIN_SECONDS)
    except TimeoutError:
        raise too_large from None
    if size > limit:
        raise too_large
    return b"".join(parts)
