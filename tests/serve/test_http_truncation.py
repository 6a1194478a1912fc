"""`truncation: "auto"` of /v1/responses: which turns of a conversation that is too long are left out."""

import pytest

from tests.serve.http_server import TOKENIZER
from tests.serve.test_http_responses import RESPONSES, ask


def turn(n, size=40):
    return [
        {"role": "user", "content": f"{n}" * size},
        {"type": "function_call", "call_id": f"{n}", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": f"{n}", "output": f"r{n}"},
        {"role": "assistant", "content": f"a{n}"},
    ]


def prompt_of(served):
    return TOKENIZER.decode(served.engine.requests[-1].prompt_ids, skip_special_tokens=False)


def test_the_oldest_turns_are_left_out(served):
    """As many as it takes, and never a part of one: its results would have no call. The server takes 512 tokens."""
    last = {"role": "user", "content": "And now?"}
    body = {"instructions": "Be kind.", "truncation": "auto", "max_output_tokens": 5}
    kept, sizes = [], []
    for turns in range(12):
        names = "ABCDEFGHIJKL"[:turns]
        given = [item for name in names for item in turn(name)]
        answer = ask(served, input=[{"role": "developer", "content": "Be short."}, *given, last], **body)
        assert answer["truncation"] == "auto"
        text = prompt_of(served)
        assert "Be kind.\n\nBe short." in text and text.count("And now?") == 1
        there = [name for name in names if name * 40 in text]
        assert there == [name for name in names if f"r{name}" in text] == list(names[turns - len(there) :])
        kept.append(len(there))
        sizes.append(len(served.engine.requests[-1].prompt_ids))
    assert kept == [min(turns, kept[-1]) for turns in range(12)]
    each = sizes[2] - sizes[1]
    assert sizes[-1] + 5 <= 512 < sizes[-1] + each + 5


@pytest.mark.parametrize("stream", [False, True])
def test_room_for_the_answer_counts(served, stream):
    given = [item for name in "ABC" for item in turn(name, 60)]
    body = {"input": [*given, {"role": "user", "content": "And now?"}], "truncation": "auto"}
    kept = []
    for room in (5, 400):
        ask(served, stream, max_output_tokens=room, **body)
        kept.append([name for name in "ABC" if name * 60 in prompt_of(served)])
    assert len(kept[0]) > len(kept[1])


def test_what_cannot_be_made_short_enough_is_refused(served):
    for given in ("x" * 600, [*turn("A"), {"role": "user", "content": "x" * 600}], turn("A", 600)):
        for truncation in ("auto", "disabled"):
            error = served.post(RESPONSES, {"input": given, "truncation": truncation}).json()["error"]
            assert (error["code"], error["param"]) == ("context_length_exceeded", "input")
    assert not served.engine.requests
