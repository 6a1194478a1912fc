"""HTTP in front of the real engine: the tiny model through the `openai` client, and one long talk with the real one."""

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import jax.numpy as jnp
import numpy as np
import openai
import pytest

from models.registry import load_model
from models.testing import tiny_tokenizer
from serve.api import create_app
from serve.args import ServeConfig
from serve.build import build_engine
from serve.engine import Engine
from serve.server import make_server
from tests.serve.http_server import wait_until
from tests.serve.tiny_engine import (
    CONFIG,
    TinyEngine,
    dense_logits,
    greedy,
    log_softmax,
    tiny_engine,
    tokens_of,
)

TOKENIZER = tiny_tokenizer()
HELLO = [{"role": "user", "content": "Hi"}]
EXACT: dict[str, Any] = {"temperature": 0, "extra_body": {"ignore_eos": True}}
IDS: dict[str, Any] = {
    "temperature": 0,
    "extra_body": {"ignore_eos": True, "return_tokens_as_token_ids": True},
}


@dataclass
class Server:
    """A running server and clients for it."""

    http: httpx.Client
    openai: openai.OpenAI

    def metric(self, name: str) -> float:
        """The value of a sample without labels, or of the only one."""
        lines = [line for line in self.http.get("/metrics").text.splitlines() if line.startswith(name)]
        (line,) = [line for line in lines if line[len(name)] in " {"]
        return float(line.rpartition(" ")[2])


@contextlib.contextmanager
def serve(engine: Engine, tokenizer: Any) -> Iterator[Server]:
    """uvicorn on a free port of loopback."""
    app = create_app(engine, tokenizer, ("tiny",))
    server = make_server(app, host="127.0.0.1", port=0, log_level="warning", shutdown_timeout=1)
    thread = threading.Thread(target=server.run, daemon=True, name="uvicorn")
    thread.start()
    try:
        wait_until(lambda: server.started, 20)
        url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        with (
            httpx.Client(base_url=url, timeout=60, trust_env=False) as http,
            openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client,
        ):
            yield Server(http, client)
    finally:
        server.should_exit = True
        thread.join(timeout=20)
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def both() -> Iterator[tuple[TinyEngine, Server]]:
    with tiny_engine() as tiny, serve(tiny.engine, TOKENIZER) as server:
        yield tiny, server


@pytest.fixture
def tiny(both) -> Iterator[TinyEngine]:
    """The engine, idle and empty before and after."""
    yield both[0]
    both[0].settle()
    both[0].forget()


@pytest.fixture
def server(both, tiny) -> Server:
    return both[1]


@pytest.fixture
def slow(tiny, monkeypatch) -> None:
    """10 ms more for every step, so that a stream lasts long enough to do something beside it."""
    run = tiny.runner.run

    def later(work, read_all):
        time.sleep(0.01)
        return run(work, read_all)

    monkeypatch.setattr(tiny.runner, "run", later)


def chat(server: Server, messages: list[dict[str, str]], **options: Any) -> Any:
    return server.openai.chat.completions.create(model="tiny", messages=messages, **options)  # type: ignore[call-overload]


# Chat


def test_chat_streaming_and_not(server):
    prompt = TOKENIZER.apply_chat_template(HELLO)
    text = TOKENIZER.decode(greedy(prompt, 40))
    whole = chat(server, HELLO, max_tokens=40, **EXACT)
    assert whole.choices[0].message.content == text
    assert whole.choices[0].finish_reason == "length"
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (len(prompt), 40)
    chunks = list(
        chat(server, HELLO, max_tokens=40, stream=True, stream_options={"include_usage": True}, **EXACT)
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == text
    assert len(chunks) > 3  # tokens that were ready together share one
    assert [c.choices[0].finish_reason for c in chunks[:-1] if c.choices[0].finish_reason] == ["length"]
    # The second time only the last token of the prompt runs.
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == len(prompt) - 1


def test_turns_of_a_conversation_reuse_the_ones_before(server, tiny):
    messages = [{"role": "user", "content": "What do you keep of what I say?"}]
    held = 0
    for turn in range(3):
        prompt = TOKENIZER.apply_chat_template(messages)
        answer = chat(server, messages, max_tokens=12, **EXACT)
        assert answer.choices[0].message.content == TOKENIZER.decode(greedy(prompt, 12))
        cached = answer.usage.prompt_tokens_details.cached_tokens
        # At least the whole prompt of the turn before; of its answer what the client sends back unchanged.
        assert held <= cached < len(prompt)
        assert (cached == 0) == (turn == 0)
        held = len(prompt)
        messages += [
            {"role": "assistant", "content": answer.choices[0].message.content},
            {"role": "user", "content": f"And of turn {turn}?"},
        ]
    tiny.settle()
    assert tiny.stored == 1
    assert server.metric("tangram:prefix_cache_hits_total") > 0


def test_what_was_read_without_an_answer_is_found_by_the_next_turn(server):
    body = {"max_tokens": 0, "messages": [{"role": "user", "content": "What was read before it is asked?"}]}
    read = server.http.post("/v1/messages", json=body).json()["usage"]
    assert (read["cache_read_input_tokens"], read["output_tokens"]) == (0, 0)
    asked = server.http.post("/v1/messages", json=body | {"max_tokens": 5}).json()["usage"]
    assert asked["cache_read_input_tokens"] == read["input_tokens"] - 1  # the last one gives the first token


def test_choices_and_seeds(server):
    options = {"n": 3, "seed": 11, "temperature": 1.0, "max_tokens": 15, "extra_body": {"ignore_eos": True}}
    first, second = (chat(server, HELLO, **options) for _ in range(2))
    texts = [choice.message.content for choice in first.choices]
    assert len(set(texts)) == 3
    assert [choice.message.content for choice in second.choices] == texts


def test_a_stop_string_ends_the_text_and_the_row_goes_on_in_the_next_turn(server, tiny):
    prompt = TOKENIZER.apply_chat_template(HELLO)
    text = TOKENIZER.decode(greedy(prompt, 40))
    stop = next(text[i : i + 2] for i in range(8, 30) if text[i : i + 2].isascii())
    answer = chat(server, HELLO, max_tokens=40, stop=stop, **EXACT)
    content = answer.choices[0].message.content
    assert (content, answer.choices[0].finish_reason) == (text[: text.index(stop)], "stop")
    tiny.settle()
    assert tiny.stored == 1


# Completions


def test_completions_by_token_ids_with_scores(server):
    prompt = tokens_of(30)
    answer = server.openai.completions.create(
        model="tiny", prompt=prompt, max_tokens=8, logprobs=3, echo=True, **IDS
    )
    tokens = prompt + greedy(prompt, 8)
    scores = answer.choices[0].logprobs
    assert scores.tokens == [f"token_id:{t}" for t in tokens]
    assert scores.token_logprobs[0] is None
    want = log_softmax(dense_logits(tokens))[np.arange(len(tokens) - 1), tokens[1:]]
    np.testing.assert_allclose(scores.token_logprobs[1:], want, atol=1e-3)


def test_several_prompts_at_once(server):
    prompts = [tokens_of(n) for n in (4, 60, 25)]
    answer = server.openai.completions.create(model="tiny", prompt=prompts, max_tokens=10, **EXACT)
    assert [c.text for c in answer.choices] == [TOKENIZER.decode(greedy(p, 10)) for p in prompts]
    assert answer.usage.prompt_tokens == 89


# Structured output


def test_structured_output_beside_a_stream_without_it(server):
    """A schema, streamed; choices; and one request of any text, whose tokens are those that it has alone."""
    schema = {"type": "array", "items": {"enum": ["ab", "cd"]}, "minItems": 1, "maxItems": 2}
    form: Any = {"type": "json_schema", "json_schema": {"name": "pair", "schema": schema}}
    free: list[str] = []

    def read() -> None:
        free.append(chat(server, HELLO, max_tokens=60, **EXACT).choices[0].message.content)

    beside = threading.Thread(target=read)
    beside.start()
    chunks = list(
        chat(server, HELLO, max_tokens=180, temperature=1, seed=4, n=2, stream=True, response_format=form)
    )
    for index in range(2):
        mine = [c.choices[0] for c in chunks if c.choices[0].index == index]
        value = json.loads("".join(c.delta.content or "" for c in mine))
        assert 1 <= len(value) <= 2
        assert set(value) <= {"ab", "cd"}
        assert [c.finish_reason for c in mine if c.finish_reason] == ["stop"]
    extra = {"guided_choice": ["left", "right"]}
    answer = server.openai.completions.create(model="tiny", prompt="x", temperature=0, extra_body=extra)
    assert answer.choices[0].text in ("left", "right")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(answer.choices[0].text)
    beside.join(60)
    assert free == [TOKENIZER.decode(greedy(TOKENIZER.apply_chat_template(HELLO), 60))]
    assert server.metric("tangram:compilations_after_warmup") == 0


# What goes wrong


@pytest.mark.parametrize("n", [1, 3])
def test_a_disconnect_in_mid_stream_leaves_a_conversation_to_go_on(server, tiny, slow, n):
    body = {"prompt": tokens_of(60), "max_tokens": 180, "stream": True, "n": n, "ignore_eos": True}
    before = tiny.engine.stats().generation_tokens_total
    with server.http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        for _ in range(6):
            next(lines)
        wait_until(lambda: tiny.engine.stats().pages_used > 0)
    wait_until(lambda: tiny.engine.stats().requests_running == 0)
    tiny.settle()
    stats = tiny.engine.stats()
    assert (stats.stored_sessions, stats.pages_used) == (1, stats.pages_stored)
    tiny.forget()
    assert tiny.engine.stats().generation_tokens_total - before < 180 * n


BAD: list[tuple[str, dict[str, Any] | list[Any], int]] = [
    ("/v1/chat/completions", {"messages": HELLO, "max_tokens": 100_000}, 400),
    ("/v1/completions", {"prompt": [8] * 5000}, 400),
    ("/v1/completions", {"prompt": "x", "model": "gpt-5"}, 404),
    ("/v1/chat/completions", {"messages": HELLO, "n": 10**6}, 400),
    ("/v1/chat/completions", {"messages": HELLO, "temperature": -1}, 400),
    ("/v1/completions", {"prompt": [CONFIG.vocab_size]}, 400),
    ("/v1/completions", {"prompt": [-1]}, 400),
    ("/v1/completions", [], 400),
    ("/v1/chat/completions", {"messages": HELLO, "heads_per_page": 4}, 400),
]


def test_bad_requests_while_a_stream_goes_on(server, tiny, slow):
    prompt = TOKENIZER.apply_chat_template(HELLO)
    arrived: list[float] = []
    text: list[str] = []

    def read() -> None:
        for chunk in chat(server, HELLO, max_tokens=150, stream=True, **EXACT):
            arrived.append(time.monotonic())
            text.append(chunk.choices[0].delta.content or "")

    stream = threading.Thread(target=read)
    stream.start()
    wait_until(lambda: len(arrived) > 3)
    for path, body, status in BAD:
        began = time.monotonic()
        response = server.http.post(path, json=body)
        assert response.status_code == status, response.text
        assert response.json()["error"]["type"] == "invalid_request_error"
        assert time.monotonic() - began < 1
    refused = time.monotonic()
    stream.join(60)
    assert arrived[-1] > refused
    assert "".join(text) == TOKENIZER.decode(greedy(prompt, 150))
    assert server.metric("tangram:compilations_after_warmup") == 0


# The real model

TURNS = [
    "The password is BANANA. What is the password?",
    "Here is some text about bees. Bees live in colonies with one queen, a few hundred drones and many thousands of "
    "workers. In winter the drones are gone, and the workers gather in a ball around the queen and shiver to keep "
    "warm. They eat the honey that was stored in summer. What do bees eat in winter? Answer in one sentence.",
    "The Danube is a river in Europe. It begins in the Black Forest in Germany, flows through ten countries, more "
    "than any other river in the world, and ends in the Black Sea. Four capitals lie on its banks: Vienna, "
    "Bratislava, Budapest and Belgrade. Where does the Danube end? Answer in one sentence.",
    "A long walk needs a good breakfast. Oats with milk and some fruit give energy for hours, eggs keep hunger away, "
    "and a glass of water is never wrong. Coffee wakes you up but does not feed you. Too much sugar makes you tired "
    "after an hour. What gives energy for hours? Answer in one sentence.",
    "What is the password?",
]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("retention", [1.0, 0.5])
def test_turn_five_recalls_turn_one_with_the_real_model(retention):
    """Some 330 tokens in turns that say the fact once, at the beginning; the shipped budgets at 0.5, and full KV."""
    model = load_model("smollm2-135m-instruct", progress=False)
    config = ServeConfig(
        max_model_len=1024,
        max_num_seqs=1,
        max_num_batched_tokens=128,
        max_stored_sessions=2,
        retention=retention,
    )
    engine = build_engine(config, model, dtype=jnp.float32).engine
    engine.start()
    messages: list[dict[str, str]] = []
    asked: list[int] = []
    try:
        with serve(engine, model.tokenizer) as server:
            for turn in TURNS:
                messages.append({"role": "user", "content": turn})
                answer = chat(server, messages, temperature=0, max_tokens=40)
                text = answer.choices[0].message.content
                messages.append({"role": "assistant", "content": text})
                cached = answer.usage.prompt_tokens_details.cached_tokens
                # All of the prompt before, and of its answer at least a part.
                assert cached > asked[-1] if asked else cached == 0
                asked.append(answer.usage.prompt_tokens)
            # The step under way at the end of an answer is still to come in.
            wait_until(lambda: engine.stats().pages_used == engine.stats().pages_stored > 0, 20)
            stats = engine.stats()
    finally:
        engine.stop()
    assert asked[-1] > 300
    assert "BANANA" in text, messages
    assert not any("BANANA" in message["content"] for message in messages[2:-1])
    assert stats.compilations_after_warmup == 0
    assert stats.stored_sessions == 1
    assert stats.prefilled_tokens_total < 0.6 * sum(asked)
    # At so few tokens the least that every head keeps, 128 entries, and the whole last answer weigh in.
    assert retention <= stats.retention_reached <= (1 if retention == 1 else 0.65)
