"""/v1/completions: prompts of all four shapes, echo, log-probabilities."""

import asyncio

import openai
import pytest

from serve.completions import CompletionFormat
from serve.request import SamplingParams
from tests.serve.fake_engine import Script
from tests.serve.http_server import EOS, ids


def complete(served, prompt, **options):
    return served.openai.completions.create(model="tiny", prompt=prompt, **options)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", [ids("ab")]),
        (["ab", "c"], [ids("ab"), ids("c")]),
        ([70, 71], [[70, 71]]),
        ([[70, 71], [72]], [[70, 71], [72]]),
    ],
)
def test_prompt_shapes(served, prompt, expected):
    completion = complete(served, prompt)
    assert [request.prompt_ids for request in served.engine.requests] == expected
    assert [(c.index, c.text, c.finish_reason) for c in completion.choices] == [
        (i, "hello", "length") for i in range(len(expected))
    ]
    assert completion.usage.prompt_tokens == sum(map(len, expected))
    assert completion.usage.completion_tokens == 5 * len(expected)
    assert (completion.object, completion.choices[0].logprobs) == ("text_completion", None)
    assert len({request.request_id for request in served.engine.requests}) == len(expected)


def test_default_length_is_16(served):
    served.script("x", cycle=True)
    completion = complete(served, "ab")
    assert (completion.choices[0].text, completion.usage.completion_tokens) == ("x" * 16, 16)
    assert served.engine.requests[0].sampling == SamplingParams(max_tokens=16)


def test_choices_of_several_prompts(served):
    served.engine.scripts = {0: Script(ids("A")), 1: Script(ids("B"))}
    completion = complete(served, ["p", "q"], n=2)
    assert [(c.index, c.text) for c in completion.choices] == [(0, "A"), (1, "B"), (2, "A"), (3, "B")]
    assert [request.n for request in served.engine.requests] == [2, 2]
    assert (completion.usage.prompt_tokens, completion.usage.completion_tokens) == (2, 4)


def test_stream(served):
    served.script([*ids("héllo"), EOS], finish="stop")
    chunks = list(complete(served, ["p", "q"], stream=True, stream_options={"include_usage": True}))
    texts, reasons = ["", ""], [None, None]
    for chunk in chunks[:-1]:
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        reasons[choice.index] = choice.finish_reason
    assert (texts, reasons) == (["héllo", "héllo"], ["stop", "stop"])
    assert (chunks[-1].choices, chunks[-1].usage.completion_tokens) == ([], 14)


def test_a_stream_begins_with_the_ids_of_the_prompt(served):
    found, tokens = {}, {}
    for chunk in complete(served, ["ab", "c"], n=2, stream=True, extra_body={"return_token_ids": True}):
        (choice,) = chunk.choices
        if choice.index not in tokens:
            found[choice.index] = choice.prompt_token_ids
        else:
            assert not hasattr(choice, "prompt_token_ids")
        tokens[choice.index] = tokens.get(choice.index, []) + choice.token_ids
    assert found == {0: ids("ab"), 1: ids("ab"), 2: ids("c"), 3: ids("c")}
    assert tokens == dict.fromkeys(range(4), ids("hello"))


def test_logprobs(served):
    lists = complete(served, "ab", logprobs=2).choices[0].logprobs
    assert lists.tokens == list("hello")
    assert lists.text_offset == [0, 1, 2, 3, 4]
    assert lists.token_logprobs == [-0.5] * 5
    assert lists.top_logprobs[0] == {"h": -0.5, "i": -1.5}
    assert served.engine.requests[0].sampling.prompt_logprobs is None
    # 0: the chosen token alone, as in vLLM.
    assert complete(served, "ab", logprobs=0).choices[0].logprobs.top_logprobs[0] == {"h": -0.5}


def test_echo(served):
    assert complete(served, "né ", echo=True).choices[0].text == "né hello"
    assert complete(served, ids("né "), echo=True).choices[0].text == "né hello"
    assert served.engine.requests[0].sampling.prompt_logprobs is None


def test_echo_with_logprobs(served):
    served.script("xy")
    completion = complete(served, "ab", echo=True, logprobs=1, max_tokens=2)
    choice = completion.choices[0]
    assert choice.text == "abxy"
    assert choice.logprobs.tokens == ["a", "b", "x", "y"]
    assert choice.logprobs.token_logprobs == [None, -1.0, -0.5, -0.5]
    assert choice.logprobs.text_offset == [0, 1, 2, 3]
    assert choice.logprobs.top_logprobs == [None, {"b": -1.0}, {"x": -0.5}, {"y": -0.5}]
    assert completion.usage.completion_tokens == 2


def test_scores_of_prompts_are_not_repeated_without_end(served, monkeypatch):
    """20 KB made an answer of 205 MB, in which the same prompt was scored 128 times."""
    monkeypatch.setattr("serve.prompts.MAX_SCORED_ECHO", 8)
    for prompt, n, stream in (("abcde", 2, False), ("abc", 3, True), (["abc", "de"], 2, False)):
        with pytest.raises(openai.BadRequestError, match="times: at most 8 in all are possible") as caught:
            complete(served, prompt, echo=True, logprobs=0, n=n, stream=stream)
        assert caught.value.param == "n"
    assert served.engine.requests == []
    for options in ({"n": 1, "logprobs": 1}, {"n": 2}):
        assert complete(served, "abcdefghi", echo=True, **options).choices[0].text == "abcdefghihello"
    assert len(complete(served, "abcd", echo=True, logprobs=0, n=2).choices) == 2


def test_echo_with_logprobs_when_a_later_choice_is_faster(served):
    served.engine.scripts = {0: Script(ids("slow")), 1: Script(ids("quick"))}
    served.engine.wait_for_choice = {0: 1}
    choices = complete(served, "ab", echo=True, logprobs=0, n=2).choices
    assert [choice.text for choice in choices] == ["abslow", "abquick"]
    assert [choice.logprobs.token_logprobs[:2] for choice in choices] == [[None, -1.0]] * 2


def test_other_work_goes_on_between_the_choices(served, monkeypatch):
    """Many long prompts with log-probabilities once stalled all streams until the whole body was built."""
    order = []
    original = CompletionFormat.choice

    def choice(self, index, delta, prompt):
        order.append(index)
        asyncio.get_running_loop().call_soon(order.append, "other")
        return original(self, index, delta, prompt)

    monkeypatch.setattr(CompletionFormat, "choice", choice)
    completion = complete(served, ["ab", "c", "d"], echo=True, logprobs=1)
    assert [choice.text for choice in completion.choices] == ["abhello", "chello", "dhello"]
    assert order == [0, "other", 1, "other", 2, "other"]


def test_scoring_a_prompt_generates_nothing(served):
    """What evaluation harnesses send: echo, logprobs and no tokens."""
    completion = complete(served, "ab", echo=True, logprobs=1, max_tokens=0)
    choice = completion.choices[0]
    assert (choice.text, choice.finish_reason) == ("ab", "length")
    assert choice.logprobs.token_logprobs == [None, -1.0]
    assert (completion.usage.prompt_tokens, completion.usage.completion_tokens) == (2, 0)
    assert served.engine.requests[0].sampling == SamplingParams(max_tokens=1, logprobs=1, prompt_logprobs=1)


@pytest.mark.parametrize("n", [1, 2])
def test_streamed_echo_comes_once_for_each_choice(served, n):
    texts = [""] * n
    for chunk in complete(served, "ab", echo=True, logprobs=0, n=n, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == ["abhello"] * n


def test_stop_string_is_not_searched_in_the_echo(served):
    assert complete(served, "hel", echo=True, stop="l").choices[0].text == "helhe"


def test_truncated_prompt(served):
    complete(served, "abcdef", extra_body={"truncate_prompt_tokens": 2})
    complete(served, "x" * 5000, max_tokens=1, extra_body={"truncate_prompt_tokens": -1})
    complete(served, "x" * 5000, max_tokens=100, extra_body={"truncate_prompt_tokens": -1})
    assert served.engine.requests[0].prompt_ids == ids("ef")
    assert [len(request.prompt_ids) for request in served.engine.requests[1:]] == [511, 412]


def test_longest_prompt_fits(served):
    completion = complete(served, "x" * 511, max_tokens=1)
    assert completion.usage.total_tokens == 512


def test_neutral_values_of_unsupported_fields(served):
    extra = {
        "logit_bias": {},
        "suffix": "",
        "best_of": 1,
        "priority": 0,
        "use_beam_search": False,
        "user": "u",
    }
    nulls = {name: None for name in ("stop", "seed", "logprobs", "stream_options", "guided_json", "echo")}
    served.post("/v1/completions", {"prompt": "a", **extra, **nulls}).raise_for_status()
