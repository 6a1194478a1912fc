"""Host work on large bodies: one at a time, nothing for clients that have left, and no text that is too long by far."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from starlette.requests import ClientDisconnect

from serve.generation import Serving
from tests.serve.http_server import TOKENIZER


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


@pytest.mark.parametrize(
    ("path", "more"),
    [
        ("/v1/completions", {"truncate_prompt_tokens": 5}),
        ("/v1/chat/completions", {"truncate_prompt_tokens": -1}),
        ("/tokenize", {}),
        ("/v1/messages/count_tokens", {}),
    ],
)
def test_a_text_of_which_all_tokens_are_wanted_has_a_limit(served, monkeypatch, path, more):
    """8 MB took up to 20 seconds for five tokens at its end."""
    monkeypatch.setattr("serve.prompts._LONGEST_WHOLE", 5000)
    encoded, encode = [], TOKENIZER.encode
    monkeypatch.setattr(TOKENIZER, "encode", lambda text, **how: encoded.append(text) or encode(text, **how))

    def answer(characters):
        text = "x" * characters
        chat = {"messages": [{"role": "user", "content": text}]}
        return served.post(path, more | (chat if "messages" in path or "chat" in path else {"prompt": text}))

    assert answer(4900).status_code == 200
    assert len(encoded) == 1
    refused = answer(5001)
    assert refused.status_code == 400 and "at most 5000 are turned into tokens here" in refused.text
    assert len(encoded) == 1
    monkeypatch.setattr("serve.prompts._LONGEST_PER_TOKEN", 20)
    assert answer(5001).status_code == 200
