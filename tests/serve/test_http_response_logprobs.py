"""Log-probabilities of /v1/responses: of the tokens of the text, which thoughts, calls and ends are not."""

import pytest
from hypothesis import given, settings

from serve.choice import Choice
from serve.parts import Content
from serve.request import SamplingParams, TokenOutput
from serve.thoughts import AnswerReader
from serve.tool_calls import CallParser
from tests.serve.harmony_template import RETURN, analysis, call, final, harmony_tokenizer
from tests.serve.http_server import EOS, TOKENIZER, ids
from tests.serve.test_http_responses import FUNCTIONS, ask, events_of
from tests.serve.test_tool_calls import NAMES, SOUP
from tests.serve.thought_templates import thought_tokenizer
from tests.serve.tool_answers import ANSWERS
from tests.serve.tool_templates import tool_tokenizer

ASKED = {"include": ["message.output_text.logprobs"], "tools": FUNCTIONS}
CALL = ANSWERS["hermes"] % '{"city": "Oslo"}'
MORE = final("") + "Two.<|end|><|start|>assistant"
CASES = {
    "text": ("generic", "Hé ☕\n\n", ["Hé ☕\n\n"]),
    "no tool": ("generic", "a <tool_call> b", ["a <tool_call> b"]),
    "no call before a call": ("generic", f'<tool_call>{{"name": {CALL}', ['<tool_call>{"name":']),
    "calls": ("generic", f"Let me see.\n{CALL}\n{CALL}\n", ["Let me see."]),
    "text around a call": ("generic", f"One ☕ {CALL}\n\nTwo. ", ["One ☕", "\n\nTwo."]),
    "thoughts": ("qwen", "<think>\nHm. ☕\n</think>\n\nÉs\n", ["És\n"]),
    "special tags": ("qwen special", f"<think>Hm.</think>\n\nYes. {CALL}", ["Yes."]),
    "opened by the prompt": ("r1", "Hm.\n</think>\nYes.", ["Yes."]),
    "thoughts alone": ("r1", "Hm.", []),
    "harmony": ("harmony", analysis("Hm.") + final("Yes."), ["Yes."]),
    "two texts": ("harmony", MORE + analysis("Hm.") + final("Yes."), ["Two.", "Yes."]),
    "a call after a text": ("harmony", MORE + call("get_weather", "{}"), ["Two."]),
}


@pytest.mark.parametrize("case", CASES)
def test_the_text_alone_has_them(server_of, case):
    name, text, expected = CASES[case]
    of = {"harmony": lambda _: harmony_tokenizer(), "generic": tool_tokenizer}.get(name, thought_tokenizer)
    server = server_of(name)
    end = RETURN if name == "harmony" else EOS
    server.script([*of(name).encode(text, add_special_tokens=False), end], finish="stop", delay=0.0005)
    whole, streamed = (ask(server, stream, **ASKED)["output"] for stream in (False, True))
    events = events_of(server, **ASKED)
    for output in (whole, streamed):
        texts = [item["content"][0] for item in output if item["type"] == "message"]
        assert [part["text"] for part in texts] == expected
        for part in texts:
            found = b"".join(bytes(entry["bytes"]) for entry in part["logprobs"])
            assert found.decode() == part["text"]
    at = [item["type"] for item in whole].index("message") if expected else 0
    of_events = [e for e in events if e["type"] == "response.output_text.delta" and e["output_index"] == at]
    assert [entry for e in of_events for entry in e["logprobs"]] == (
        whole[at]["content"][0]["logprobs"] if expected else []
    )


@pytest.mark.parametrize(
    ("stop", "expected"), [("lo", "hel"), ("l", "he"), ("ox", "hello"), ("llx", "hello")]
)
@pytest.mark.parametrize("at_once", [True, False])
def test_what_a_stop_string_cuts_off_has_none(stop, expected, at_once):
    """And what was held back for one has its own, whenever it is taken."""
    choice = Choice(
        TOKENIZER, SamplingParams(max_tokens=9, logprobs=0), stops=[stop], reader=AnswerReader("none")
    )
    deltas = []
    for number, token in enumerate(ids("hello")):
        end = "length" if number == 4 else None
        choice.feed(TokenOutput(token_id=token, logprob=-float(number), finish_reason=end))
        if not at_once and (delta := choice.take()):
            deltas.append(delta)
    if at_once:
        deltas.append(choice.take())
    assert "".join(delta.text for delta in deltas) == expected
    found = [entry for delta in deltas for _, entry in delta.content_logprobs]
    assert [(entry.token_id, entry.logprob) for entry in found] == [
        (token, -float(number)) for number, token in enumerate(ids(expected))
    ]


@settings(max_examples=200)
@given(SOUP)
def test_what_is_no_call_has_those_of_its_own_tokens(text):
    """Whatever is held back until it is clear that it is none."""
    reader = AnswerReader("none", CallParser("hermes", NAMES))
    choice = Choice(TOKENIZER, SamplingParams(max_tokens=9999, logprobs=0), reader=reader)
    tokens = [*ids(text + "é")[:-1], EOS]  # it ends within a character
    content, found = "", []
    for number, token in enumerate(tokens, 1):
        choice.feed(TokenOutput(token_id=token, finish_reason="stop" if number == len(tokens) else None))
        if delta := choice.take():
            content += "".join(part.text for part in delta.parts if isinstance(part, Content))
            found += [entry.token_id - 8 for _, entry in delta.content_logprobs]
    assert bytes(found).decode(errors="replace") == content
