"""Tokens that reach the event loop together (`--stream-interval`)."""

import asyncio
import contextlib
import itertools
import re
from unittest import mock

import pytest

from serve.request import GenerationRequest, SamplingParams, TokenOutput
from serve.stream import Submission
from tests.serve.fake_engine import _Choice
from tests.serve.http_server import EOS, ids, serving
from tests.serve.tool_templates import tool_tokenizer

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 40}
SOON = 0.05  # seconds between tokens: what comes before the first has left goes with it
TOOLS = {"tools": [{"type": "function", "function": {"name": "f"}}]}


@pytest.fixture(scope="module")
def served():
    with serving(stream_interval=4, tokenizer=tool_tokenizer("hermes"), max_model_len=4096) as running:
        yield running


def pieces(served, **rest):
    """The texts of a streamed chat's events, by choice."""
    found = {}
    for chunk in served.openai.chat.completions.create(model="tiny", stream=True, **CHAT | rest):
        for choice in chunk.choices:
            if choice.delta.content:
                found.setdefault(choice.index, []).append(choice.delta.content)
    return found


def test_the_first_token_comes_at_once_and_the_last_ones_with_the_end(served):
    served.script("abcdefghijk", delay=SOON)
    assert pieces(served) == {0: ["a", "bcde", "fghi", "jk"]}
    served.script([*ids("abc"), EOS], finish="stop", delay=SOON)
    assert pieces(served) == {0: ["a", "bc"]}


def test_every_choice_has_its_own(served):
    served.script("abcdef", delay=SOON)
    assert pieces(served, n=3) == {n: ["a", "bcde", "f"] for n in range(3)}


def test_a_stop_string_in_the_middle_of_them_ends_the_text_there(served):
    served.script("abcdefghijklmnopqrst", finish="none")
    assert "".join(pieces(served, stop=["gh"])[0]) == "abcdef"
    answer = served.post("/v1/chat/completions", CHAT | {"stop": ["gh"]}).json()
    assert answer["choices"][0]["message"]["content"] == "abcdef"
    assert answer["usage"]["completion_tokens"] == 8


FAULTS = [("error", "it broke"), ("abort", "The server dropped this request")]


@contextlib.contextmanager
def failing(served, after, reason):
    """The engine gives up each choice behind so many tokens."""
    served.script("abcdefgh", finish="none")
    next_output = _Choice.next_output

    def fail(choice):
        if choice.position == after:
            return TokenOutput(choice=choice.index, finish_reason=reason, error="it broke")
        return next_output(choice)

    with mock.patch.object(_Choice, "next_output", fail):
        yield


@pytest.mark.parametrize(("reason", "message"), FAULTS)
def test_a_fault_is_told_at_once_behind_what_came_before(served, reason, message):
    for n in (1, 2):
        with failing(served, 3, reason):
            body = CHAT | {"stream": True, "n": n}
            answer = served.post("/v1/chat/completions", body).text
        assert message in answer
        assert re.findall('"content":"(\\w+)"', answer)[:1] == ["a"]
        assert '"content":"bc"' in answer
    with failing(served, 3, reason):
        assert message in served.post("/v1/chat/completions", CHAT).json()["error"]["message"]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("reason", "message"), FAULTS)
def test_a_fault_behind_a_stop_string_is_none(served, stream, reason, message):
    with failing(served, 4, reason):
        answer = served.post("/v1/chat/completions", CHAT | {"stop": ["cd"], "stream": stream})
    assert answer.status_code == 200
    assert message not in answer.text and '"finish_reason":"stop"' in answer.text


@pytest.mark.parametrize(
    ("body", "together"),
    [({}, 8), ({"stop": ["x"]}, 4), (TOOLS, 4), ({"stream": True}, 4), ({"stream": True, "stop": ["x"]}, 4)],
    ids=str,
)
def test_nobody_sees_the_tokens_of_whole_answers(served, body, together):
    """So they come in larger groups, but where what they say may end the answer."""
    served.script("a" * 30)
    with mock.patch("serve.generation.Submission", wraps=Submission) as made:
        assert served.post("/v1/chat/completions", CHAT | body).status_code == 200
    assert made.call_args.args[-1] == together


def test_arrivals_keep_their_times():
    """Metrics tell of each token when it came from the engine."""
    posted, counts, clock = [], [], itertools.count()
    engine, hub = mock.Mock(), mock.Mock(post=lambda _, __, arrival: posted.append(arrival[0]))
    engine.submit.return_value = None
    request = GenerationRequest(request_id="", prompt_ids=[1], sampling=SamplingParams(max_tokens=9))

    async def run() -> None:
        await Submission(engine, hub, [request], "", 3).submit()
        receive = engine.submit.call_args.args[1]
        with mock.patch("serve.stream.time", mock.Mock(monotonic=lambda: next(clock))):
            for n in range(6):
                receive(TokenOutput(token_id=n, finish_reason="length" if n == 5 else None))
                counts.append(len(posted))

    asyncio.run(run())
    assert counts == [1, 1, 1, 4, 4, 6]
    assert posted == [0, 1, 2, 3, 4, 5]
