"""Compiling grammars and following them token by token, over tokenizers of both kinds."""

import itertools
import json
import os
import random
import re
import signal
import subprocess
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from models.config import ModelConfig
from models.gguf_tokenizer import read_tokenizer
from models.testing import tiny_config, tiny_tokenizer
from serve import grammar, schemas
from serve.grammar import GrammarError, GrammarFailure, Stop, Vocabulary
from serve.structured import GrammarSpec
from serve.tool_formats import LLAMA3_JSON
from tangram_jax.sampling_filters import mask_words

ENDS = (0, 2)
SIZE = 300  # more rows than the tokenizer has tokens, and no multiple of 32
TOKENIZER = tiny_tokenizer()
TINY = Vocabulary(TOKENIZER, SIZE, ENDS)
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "minimum": 0, "maximum": 150}},
    "required": ["name", "age"],
    "additionalProperties": False,
}  # fmt: skip


def sentencepiece():
    """As a GGUF file of Llama 2 has it: control tokens, bytes, pieces with a sign for the space, one of two letters."""
    pieces = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3)]
    pieces += [(f"<0x{b:02X}>", 0.0, 6) for b in range(256)]
    pieces += [
        ("\u2581", -1.0, 1),
        *((chr(c), -2.0 - c, 1) for c in range(33, 127)),
        ("\u2581y", -9.0, 1),
        ("es", -8.0, 1),
    ]
    fields = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [token for token, _, _ in pieces],
        "tokenizer.ggml.scores": [score for _, score, _ in pieces],
        "tokenizer.ggml.token_type": [kind for _, _, kind in pieces],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    config: ModelConfig = tiny_config(eos_token_ids=(2,))
    return read_tokenizer(fields.get, "tiny.gguf", config, {"bos": 1, "eos": 2})


def lark(kind, value) -> str:
    return GrammarSpec(kind, value if isinstance(value, str) else json.dumps(value), "x").lark


def allowed(state) -> set[int]:
    bits = np.unpackbits(state.mask.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def write(state, tokenizer, seed: int, most: int = 2000) -> str:
    """A random text of the grammar, up to its end or an end token."""
    choose, tokens = random.Random(seed), []
    for _ in range(most):
        token = choose.choice(sorted(allowed(state)))
        if token in ENDS:
            break
        tokens.append(token)
        if state.advance(token):
            break
    else:
        raise AssertionError("the grammar never ended")
    return b"".join(tokenizer.token_bytes(i) for i in tokens).decode()


def byte(text: str) -> int:
    return ord(text) + 8


@pytest.mark.parametrize(
    ("kind", "value", "check"),
    [
        ("regex", r"[a-c]{2,5}\d/x?", lambda t: re.fullmatch(r"[a-c]{2,5}[0-9]/x?", t)),
        ("regex", "^(yes|no)$", lambda t: t in ("yes", "no")),
        ("choice", ["a", "ab", 'q"\\\n/é😀'], lambda t: t in ("a", "ab", 'q"\\\n/é😀')),
        ("json", PERSON, lambda t: json.loads(t).keys() == {"name", "age"} and 0 <= json.loads(t)["age"] <= 150),
        ("choice", ["\x7f", "b"], lambda t: t in ("\x7f", "b")),
        ("json", {"enum": ["red", 3, None]}, lambda t: json.loads(t) in ("red", 3, None)),
        ("grammar", 'start: "(" start ")" | "x"', lambda t: re.fullmatch(r"\(*x\)*", t) and t.count("(") == t.count(")")),
    ],
    ids=lambda case: "text" if callable(case) else str(case)[:40],
)  # fmt: skip
def test_what_is_written_has_the_form(kind, value, check):
    compiled = TINY.compile(lark(kind, value))
    texts = [write(compiled.start(), TOKENIZER, seed) for seed in range(12)]
    for text in texts:
        assert check(text), text
    assert len(set(texts)) > 1


def test_sentencepiece_and_its_bytes():
    """A letter may come as its piece or as a byte, "es" as one piece, and a space is a part of what comes after it."""
    tokenizer = sentencepiece()
    vocabulary = Vocabulary(tokenizer, tokenizer.vocab_size + 7, tokenizer.eos_token_ids)
    state = vocabulary.compile(lark("regex", "(yes| y)!")).start()

    def spelled(state) -> set[str]:
        return {tokenizer._backend.id_to_token(i) for i in allowed(state)}

    assert spelled(state) == {"y", "<0x79>", "<0x20>", "\u2581", "\u2581y"}
    state.advance(tokenizer._backend.token_to_id("<0x79>"))
    assert spelled(state) == {"e", "<0x65>", "es"}
    assert not state.advance(tokenizer._backend.token_to_id("es"))
    assert spelled(state) == {"!", "<0x21>"}
    assert state.advance(tokenizer._backend.token_to_id("!"))


@pytest.mark.parametrize("text", ['{"city": "x"}', '{"city":"x"}', '{"name": "f", "parameters": {"q": 1}}'])
def test_an_answer_in_json_may_begin_like_a_call_in_json(text):
    answer = GrammarSpec(
        "json", json.dumps({"properties": {"city": {"type": "string"}}, "required": ["city"]}), "r"
    )
    state = TINY.compile(LLAMA3_JSON.lark({"f": {"type": "object"}}, {}, many=True, answer=answer)).start()
    for token in TOKENIZER.encode(text, add_special_tokens=False):
        assert token in allowed(state)
        state.advance(token)
    assert allowed(state) & set(ENDS)


def test_end_tokens_are_allowed_where_the_grammar_accepts():
    state = TINY.compile(lark("regex", "ab?c?")).start()
    assert allowed(state) == {byte("a")}
    assert not state.advance(byte("a"))
    assert allowed(state) == {byte("b"), byte("c"), *ENDS}
    assert state.advance(byte("c"))
    assert allowed(state) == set(ENDS)


def test_end_tokens_are_left_out_as_long_as_something_else_can_follow():
    state = TINY.compile(lark("regex", "ab?c?")).start(ignore_end=True)
    assert not state.advance(byte("a"))
    assert allowed(state) == {byte("b"), byte("c")}
    assert state.advance(byte("c"))


def test_special_tokens_and_ids_without_a_token_are_no_text():
    state = TINY.compile(lark("regex", r"(?s:.){1,4}")).start()
    assert allowed(state) <= set(range(8, 264))
    named = TINY.compile('start: "a" <|im_start|> "b"').start()
    named.advance(byte("a"))
    assert allowed(named) == {1}


def test_choices_have_states_of_their_own():
    compiled = TINY.compile(lark("choice", ["ax", "by"]))
    one, two = compiled.start(), compiled.start()
    one.advance(byte("a"))
    assert allowed(two) == {byte("a"), byte("b")}
    two.advance(byte("b"))
    assert (allowed(one), allowed(two)) == ({byte("x")}, {byte("y")})
    assert allowed(compiled.start()) == {byte("a"), byte("b")}


def test_one_grammar_may_be_started_by_many_threads():
    compiled = TINY.compile(lark("json", PERSON))
    faults, texts = [], []

    def run(seed):
        try:
            texts.extend(write(compiled.start(), TOKENIZER, seed) for _ in range(5))
        except Exception as error:
            faults.append(error)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
    assert len(texts) == 30
    assert all(json.loads(text)["age"] <= 150 for text in texts)


def test_spaces_between_parts_of_json_are_few():
    """A model that writes one space after the other must come to an end."""
    state = TINY.compile(lark("json", {"type": "object"})).start()
    state.advance(byte("{"))
    count = 0
    while byte(" ") in allowed(state):
        state.advance(byte(" "))
        count += 1
    assert count == 40


def test_a_wrong_token_is_a_failure_of_this_choice():
    compiled = TINY.compile(lark("regex", "ab"))
    state = compiled.start()
    with pytest.raises(GrammarFailure, match="cannot be followed any further"):
        state.advance(byte("x"))
    assert not compiled.start().advance(byte("a"))


def test_a_panic_of_the_library_is_a_failure_of_this_choice(monkeypatch):
    class PanicException(BaseException):
        pass

    class Broken:
        def consume_token(self, token):
            raise PanicException("lost")

    state = TINY.compile(lark("regex", "ab")).start()
    monkeypatch.setattr(state, "_matcher", Broken())
    with pytest.raises(GrammarFailure, match="PanicException: lost"):
        state.advance(byte("a"))


def test_a_grammar_that_takes_long_for_every_token_ends(monkeypatch):
    monkeypatch.setattr(grammar, "SLOW_STEP", -1.0)
    with pytest.raises(GrammarFailure, match="too long for every token"):
        TINY.compile(lark("regex", "ab")).start().advance(byte("a"))


def test_a_grammar_that_takes_a_little_long_for_many_tokens_ends(monkeypatch):
    """What a choice may take of the engine's thread is counted from its beginning."""
    state = TINY.compile(lark("regex", "a*")).start()
    clock = itertools.count(0.0, 0.05)
    monkeypatch.setattr(grammar.time, "thread_time", lambda: next(clock))
    for _ in range(5):
        state.advance(byte("a"))
    with pytest.raises(GrammarFailure, match="too long for every token"):
        state.advance(byte("a"))


def test_quick_tokens_save_up_no_time_for_slow_ones(monkeypatch):
    state = TINY.compile(lark("regex", "a*")).start()
    for _ in range(1000):
        state.advance(byte("a"))
    clock = itertools.count(0.0, 0.05)
    monkeypatch.setattr(grammar.time, "thread_time", lambda: next(clock))
    with pytest.raises(GrammarFailure, match="too long for every token"):
        for _ in range(6):
            state.advance(byte("a"))


def test_a_grammar_that_cannot_be_started(monkeypatch):
    compiled = TINY.compile(lark("regex", "ab"))

    class PanicException(BaseException):
        pass

    def lost():
        raise PanicException("lost")

    monkeypatch.setattr(compiled, "_matcher", SimpleNamespace(deep_copy=lost))
    with pytest.raises(GrammarFailure, match="PanicException: lost"):
        compiled.start()


CHAIN = "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(4000)) + 'r4000: "a"'
BAD = [
    (lark("regex", "a(b"), "unclosed group"),
    (lark("regex", "a(?=b)"), "look-ahead"),
    (lark("json", {"type": "obect"}), "Invalid type: obect"),
    (lark("json", {"$ref": "http://example.org/x"}), "does not fetch"),
    (lark("json", {"type": "integer", "minimum": 3, "maximum": 2}), "minimum \\(3\\) is greater than maximum \\(2\\)"),
    ('start: "a" b\nb: foo', "line 2, column 4: unknown name"),
    ('start "a"', "Expected token"),
    ('start: ""', "only the empty one"),
    ("start: a\na: b\nb: a", "NoExtensionBias"),
    ("start: " + "(" * 20000 + '"a"' + ")" * 20000, "too deeply nested"),
    (CHAIN, "too large, or nested too deep"),
    (lark("regex", "a?" * 2000), "too many"),
    (lark("json", json.loads('{"items":' * 140 + "{}" + "}" * 140)), "recursion limit"),
]  # fmt: skip


@pytest.mark.parametrize("name", sorted(schemas._FORMATS))
def test_formats_that_the_library_follows(name):
    TINY.compile(lark("json", {"type": "string", "format": name}))


def test_formats_that_the_library_refuses_are_left_out():
    """Were they known some day, they would have to be followed."""
    for name in ("path", "regex", "int32"):
        with pytest.raises(GrammarError, match="Unknown format"):
            TINY.compile('start: %json {"format": "' + name + '"}')
        TINY.compile(lark("json", {"format": name}))


@pytest.mark.parametrize(("text", "message"), BAD, ids=lambda case: case[:30])
def test_bad_grammars_say_why(text, message):
    with pytest.raises(GrammarError, match=message) as caught:
        TINY.compile(text)
    assert len(str(caught.value)) <= 500
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("schema", "names", "place"),
    [
        ({"a": [{"b": {}}, {"b": {"c": 1}}], "c": 2}, "xcb", " (at '#')"),
        ({"a": [{"b": {}}, {"b": {"d": 1}}], "c": 2}, "xdb", " (at '#/a/1/b')"),
        ({"a": [{"b": {}}, {"b": {"d": 1}}], "c": 2}, "xxybd", " (at '#/a/0')"),
        ({"a": 1}, "xyzva", ""),  # of the client's own text, which an error may quote
        ({"x": [0] * 10_000, "y": {"a": 1}}, "a", ""),
        ({"x": [0] * 9_000, "y": {"a": 1}}, "a", " (at '#/y')"),
    ],
    ids=["root", "deep", "second", "names", "large", "less"],
)
def test_where_the_fault_of_a_schema_is(schema, names, place):
    """Looked for within a bound: a schema of 97 KB held up the event loop for seconds."""
    fault = "odd: " + ", ".join(f'"{name}"' for name in names)
    spec = GrammarSpec("json", json.dumps(schema), "guided_json")
    assert spec.error(fault).message == f"Invalid value for 'guided_json': {fault}{place}."


def test_forced_text_takes_no_time():
    """A billion letters that must come next: with forcing, the library would put all of them into tokens at once."""
    state = TINY.compile('%llguidance {"no_forcing": false}\nstart: /x((a{1000}){1000}){1000}/').start()
    state.advance(byte("x"))
    for _ in range(50):
        assert allowed(state) == {byte("a")}
        state.advance(byte("a"))


def test_a_trial_without_an_end_is_ended(monkeypatch, tmp_path):
    script = tmp_path / "forever.py"
    script.write_text("import time\ntime.sleep(60)\n")
    monkeypatch.setattr(grammar, "_TRIAL", script)
    monkeypatch.setattr(grammar, "TRIAL_SECONDS", 0.3)
    with pytest.raises(GrammarError, match="too long to compile"):
        TINY.compile('start: "a"')


@pytest.mark.parametrize("early", [True, False])
def test_a_trial_that_nobody_waits_for_is_ended(monkeypatch, tmp_path, early):
    script, stop, trials = tmp_path / "forever.py", Stop(), []
    script.write_text("import time\ntime.sleep(60)\n")

    class Trial(subprocess.Popen):
        def communicate(self, *args, **kwargs):
            trials.append(self)
            stop.set()
            return super().communicate(*args, **kwargs)

    monkeypatch.setattr(grammar, "_TRIAL", script)
    monkeypatch.setattr("subprocess.Popen", Trial)
    if early:
        stop.set()
    with pytest.raises(GrammarError):
        TINY.compile('start: "a"', stop)
    assert [trial.returncode for trial in trials] == [-signal.SIGKILL]


def test_a_trial_leaves_the_processors_to_others(monkeypatch, tmp_path):
    script = tmp_path / "niceness.py"
    script.write_text(
        f"import os, runpy\nrunpy.run_path({str(grammar._TRIAL)!r}, run_name='__main__')\nprint('nice', os.nice(0))\n"
    )
    monkeypatch.setattr(grammar, "_TRIAL", script)
    with pytest.raises(GrammarError, match=f"^nice {min(os.nice(0) + 5, 19)}$"):
        TINY.compile('start: "a"')


def test_a_trial_that_cannot_run_is_not_the_fault_of_the_grammar(monkeypatch, tmp_path):
    monkeypatch.setattr(grammar, "_TRIAL", tmp_path / "missing.py")
    with pytest.raises(RuntimeError, match=r"missing\.py"):
        TINY.compile('start: "a"')


def test_a_model_without_an_end_token():
    with pytest.raises(GrammarError, match="no token that ends a text"):
        Vocabulary(TOKENIZER, 264, ())


def test_mask_size():
    state = TINY.compile('start: "a"').start()
    assert state.mask.shape == (mask_words(SIZE),)
    assert state.mask.dtype == np.uint32
