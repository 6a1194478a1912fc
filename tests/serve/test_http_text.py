"""Stop strings and incremental text: the same result for every way of cutting the text."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.choice import Choice
from serve.request import PromptLogprob, SamplingParams, TokenOutput
from serve.text import StopScanner, _failure_table, _failure_tables
from tests.models.test_tokenizer import sentencepiece_tokenizer
from tests.serve.http_server import EOS, TOKENIZER, ids


def scan_whole(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Reference: the first end of a match, and of several that end there the longest."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def cut(text: str, cuts: list[int]) -> list[str]:
    borders = [0, *sorted(c % (len(text) + 1) for c in cuts), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(borders)]


stops_of = lambda alphabet: st.lists(st.text(alphabet, min_size=1, max_size=6), min_size=1, max_size=4)  # noqa: E731


@settings(max_examples=400)
@given(st.text("ab", max_size=40), stops_of("ab"), st.lists(st.integers(0, 99), max_size=12), st.booleans())
def test_any_chunking_finds_the_same_stop(text, stops, cuts, include):
    expected, matched = scan_whole(text, stops, include)
    scanner = StopScanner(stops, include)
    shown = "".join([scanner.push(piece) for piece in cut(text, cuts)])
    assert scanner.matched == matched
    if matched is None:
        # Exactly the text that may still become a stop string is held back, not more.
        prefixes = {stop[:i] for stop in stops for i in range(len(stop))}
        held = max(i for i in range(len(text) + 1) if text[len(text) - i :] in prefixes)
        assert shown == text[: len(text) - held]
        shown += scanner.finish()
    assert shown == expected


@settings(max_examples=100)
@given(
    st.text("aé🙂 ", max_size=20),
    stops_of("aé🙂 "),
    st.sets(st.integers(0, 60)),
    st.booleans(),
)
def test_streamed_text_equals_whole_text(text, stops, takes, include):
    """Tokens are bytes here, so characters and stop strings come in pieces."""
    expected, matched = scan_whole(text, stops, include)
    choice = Choice(TOKENIZER, SamplingParams(max_tokens=99, logprobs=0), stops=stops, include_stop=include)
    shown, logprobs, stopped = "", [], False
    for i, token in enumerate(ids(text)):
        stopped = choice.feed(TokenOutput(token_id=token, logprob=-float(i)))
        if i in takes and (delta := choice.take()) is not None:
            assert delta.text or delta.finish_reason
            shown += delta.text
            logprobs += delta.logprobs
        if stopped:
            break
    if not stopped:
        choice.feed(TokenOutput(finish_reason="length"))
    if (delta := choice.take()) is not None:
        shown += delta.text
        logprobs += delta.logprobs
    assert shown == expected
    assert (choice.finish_reason, stopped) == (("stop", True) if matched else ("length", False))
    assert [entry.logprob for entry in logprobs] == [-float(i) for i in range(choice.num_tokens)]
    complete = [len(text.encode()[:i].decode("utf-8", "ignore")) for i in range(choice.num_tokens)]
    assert [entry.offset for entry in logprobs] == complete


def run(tokens, finish="length", **options):
    sampling = options.pop("sampling", SamplingParams(max_tokens=99))
    choice = Choice(TOKENIZER, sampling, **options)
    for token in tokens[:-1]:
        choice.feed(TokenOutput(token_id=token))
    choice.feed(TokenOutput(token_id=tokens[-1], finish_reason=finish))
    return choice, choice.take()


def test_held_back_text_is_released_at_the_end():
    _, delta = run(ids("wait for STO"), stops=["STOP"])
    assert (delta.text, delta.finish_reason) == ("wait for STO", "length")


def test_stop_string_wins_over_length_on_the_last_token():
    choice, delta = run(ids("done."), stops=["."])
    assert (delta.text, delta.finish_reason, delta.stop_reason) == ("done", "stop", ".")
    assert choice.num_tokens == 5


def test_stop_token_is_counted_but_not_shown():
    sampling = SamplingParams(max_tokens=9, stop_token_ids=(ids("!")[0],))
    choice, delta = run(ids("hi!"), "stop", sampling=sampling)
    assert (delta.text, delta.stop_reason, choice.num_tokens) == ("hi", ids("!")[0], 3)
    _, delta = run(ids("hi!"), "stop", sampling=sampling, include_stop=True)
    assert delta.text == "hi!"


def test_eos_is_hidden_unless_special_tokens_are_asked_for():
    _, delta = run([*ids("hi"), EOS], "stop", include_stop=True)
    assert (delta.text, delta.stop_reason) == ("hi", None)
    _, delta = run([*ids("hi"), EOS], "stop", include_stop=True, skip_special_tokens=False)
    assert delta.text == "hi<|im_end|>"


def test_min_tokens_are_exempt_from_stop_strings():
    sampling = SamplingParams(max_tokens=9, min_tokens=3)
    _, delta = run(ids("aXaXb"), sampling=sampling, stops=["aX", "X"])
    assert (delta.text, delta.finish_reason) == ("aXa", "stop")


def test_choices_share_what_is_made_of_their_stop_strings(served, monkeypatch):
    """128 choices with 16 long ones took a second, in which no stream went on."""
    made = []
    _failure_tables.cache_clear()
    monkeypatch.setattr("serve.text._failure_table", lambda stop: made.append(stop) or _failure_table(stop))
    served.post("/v1/completions", {"prompt": "a", "n": 16, "stop": ["one", "two"]}).raise_for_status()
    assert sorted(made) == ["one", "two"]


def test_a_stop_string_begins_anew_within_its_own_beginning():
    """After "aba" an "a" goes on from neither "aba" nor "a", but begins one."""
    scanner = StopScanner(["abab"])
    assert (scanner.push("abaabab"), scanner.matched) == ("aba", "abab")


def test_no_stop_string_spans_what_is_exempt():
    """Only what is held back of it is forgotten then: what follows would be cut off where nothing matches."""
    scanner = StopScanner(["END"])
    assert [scanner.push("an E"), scanner.push("", match=False), scanner.push("ND")] == ["an ", "E", "ND"]
    assert scanner.matched is None
    assert (scanner.push("END"), scanner.matched) == ("", "END")


def test_a_text_that_goes_on_within_a_character():
    """A prompt may end with any bytes of one but its last."""
    for whole in ("é", "🙂"):
        *begun, last = ids(whole)
        choice = Choice(TOKENIZER, SamplingParams(max_tokens=1))
        choice.continue_text([*ids("a long prompt "), *begun])
        choice.feed(TokenOutput(token_id=last, finish_reason="length"))
        assert choice.take().text == whole


@pytest.mark.parametrize("whole", [False, True])
def test_a_text_that_does_not_complete_the_character_of_its_prompt(whole):
    """What stands for the prompt's bytes is none of it, nor a stop string; what the text itself leaves unfinished is."""
    for begun in ids("é")[:1], ids("🙂")[:3]:
        for told, wanted in ((ids("yes"), "yes"), (ids("é")[:1], "\ufffd"), ([], "")):
            choice = Choice(TOKENIZER, SamplingParams(max_tokens=9), stops=["\ufffdy"])
            choice.continue_text([*ids("caf"), *begun], whole=whole)
            for token in told:
                choice.feed(TokenOutput(token_id=token))
            choice.feed(TokenOutput(token_id=None, finish_reason="stop"))
            delta = choice.take()
            assert (delta.text, delta.stop_reason) == (wanted, None), (begun, told)


def test_an_echo_of_a_prompt_that_ends_within_a_character():
    choice = Choice(TOKENIZER, SamplingParams(max_tokens=1), drop_generated=True)
    choice.echo(None, [*ids("caf"), *ids("é")[:1]], None)
    assert choice.take(everything=True).text == "caf\ufffd"


def test_unfinished_character_becomes_a_replacement_character():
    _, delta = run(ids("é")[:1])
    assert delta.text == "\ufffd"


def test_echo_offsets_follow_the_text():
    choice = Choice(TOKENIZER, SamplingParams(max_tokens=2, logprobs=0, prompt_logprobs=0))
    choice.echo("né", ids("né"), [None, PromptLogprob(-1.0, []), PromptLogprob(-2.0, [])])
    choice.feed(TokenOutput(token_id=ids("x")[0], logprob=-3.0, finish_reason="length"))
    delta = choice.take()
    assert delta.text == "néx"
    assert [(e.offset, e.logprob) for e in delta.logprobs] == [(0, None), (1, -1.0), (1, -2.0), (2, -3.0)]


@pytest.mark.parametrize("skip", [True, False])
def test_echo_offsets_count_special_tokens_where_the_text_has_them(skip):
    text = "é<|im_start|>a<|im_end|>b"
    prompt = [min(TOKENIZER.special_ids), *TOKENIZER.encode(text, add_special_tokens=False)]
    choice = Choice(TOKENIZER, SamplingParams(max_tokens=2, logprobs=0), skip_special_tokens=skip)
    choice.echo(text, prompt, [None] * len(prompt))
    choice.feed(TokenOutput(token_id=ids("x")[0], logprob=-3.0, finish_reason="length"))
    delta = choice.take()
    assert delta.text == text + "x"
    # The first token is none of the text: a tokenizer may put one in front.
    assert [e.offset for e in delta.logprobs] == [0, 0, 0, 1, 13, 14, 24, 25]
    # Of tokens alone the text is what is shown of them.
    choice = Choice(TOKENIZER, SamplingParams(max_tokens=2, logprobs=0), skip_special_tokens=skip)
    choice.echo(None, prompt, [None] * len(prompt))
    choice.feed(TokenOutput(token_id=ids("x")[0], logprob=-3.0, finish_reason="length"))
    delta = choice.take()
    assert delta.text == ("éabx" if skip else f"<|endoftext|>{text}x")
    assert delta.logprobs[-1].offset == len(delta.text) - 1


@pytest.mark.parametrize("skip", [True, False])
def test_echo_offsets_behind_a_token_that_the_tokenizer_puts_before_the_text(skip):
    """The text begins behind it, and not with the space that SentencePiece has there."""
    tokenizer = sentencepiece_tokenizer()
    prompt = [1, *tokenizer.encode("a b", add_special_tokens=False)]
    choice = Choice(tokenizer, SamplingParams(max_tokens=2, logprobs=0), skip_special_tokens=skip)
    choice.echo("a b", prompt, [None] * len(prompt))
    offsets = [entry.offset for entry in choice.take(everything=True).logprobs]
    assert offsets[:2] == [0, 0] and offsets == sorted(offsets) and offsets[-1] < len("a b")


def test_late_outputs_are_ignored():
    choice, _ = run(ids("a.b"), stops=["."])
    assert choice.feed(TokenOutput(token_id=5)) is False
    assert (choice.num_tokens, choice.take()) == (2, None)


def test_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match="must not be empty"):
        StopScanner(["a", ""])
