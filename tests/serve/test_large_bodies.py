"""Host work on large bodies: one at a time, and nothing is begun for clients that have left."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from starlette.requests import ClientDisconnect

from serve.generation import Serving


def test_nothing_is_begun_for_a_client_that_has_left():
    begun, go, done = threading.Event(), threading.Event(), []

    def first():
        begun.set()
        assert go.wait(10)
        return "first"

    async def stays():
        await asyncio.sleep(60)

    async def has_left():
        return {"type": "http.disconnect"}

    def request(receive):
        return SimpleNamespace(receive=receive, state=SimpleNamespace(body_bytes=1 << 20))

    async def serve():
        with ThreadPoolExecutor(1) as large:
            serving = SimpleNamespace(executor=None, large_executor=large)
            running = asyncio.create_task(Serving.in_thread(serving, request(stays), first))
            await asyncio.to_thread(begun.wait, 10)
            with pytest.raises(ClientDisconnect):
                await Serving.in_thread(serving, request(has_left), done.append, "of the one that left")
            await asyncio.sleep(0)  # the executor hears of it in the loop's next turn
            go.set()
            assert await running == "first"

    asyncio.run(serve())
    assert not done
