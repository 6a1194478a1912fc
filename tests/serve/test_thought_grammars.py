"""Grammars that leave room for thoughts: what they allow before the form, and that the form holds after it."""

import asyncio
import json
from functools import partial

import pytest

from models.testing import tiny_tokenizer
from serve.errors import APIError
from serve.grammar import Vocabulary
from serve.grammar_cache import GrammarCache
from serve.parts import Content, Thought, merged
from serve.protocol import ChatRequest
from serve.structured import GrammarSpec
from serve.thought_prompt import ThoughtSupport
from serve.thoughts import AnswerReader
from serve.tool_prompt import ToolSupport
from tests.serve.test_grammar import allowed
from tests.serve.test_tool_formats import TOOLS, write
from tests.serve.thought_templates import TAGS, thought_tokenizer

SLOW = partial(pytest.param, marks=pytest.mark.slow)
TOKENIZERS = {"text": thought_tokenizer("qwen"), "special": thought_tokenizer("qwen special")}
VOCABULARIES = {name: Vocabulary(tokenizer, 264, (0, 2)) for name, tokenizer in TOKENIZERS.items()}
PERSON = {
    "type": "object",
    "properties": {"age": {"type": "integer"}},
    "required": ["age"],
    "additionalProperties": False,
}
FORMS = {
    "json": GrammarSpec("json", json.dumps(PERSON), "x"),
    "regex": GrammarSpec("regex", r"[0-9]{2}/[^<]{1,9}\.", "x"),
    "choice": GrammarSpec("choice", '["<thing>", "\\u00e9 {"]', "x"),
    "grammar": GrammarSpec("grammar", 'start: "(" start ")" | form\nform: SPACE // }\nSPACE: /[a-z]+/\n%ignore / +/', "x"),
}  # fmt: skip
ANSWERS = {"json": '{"age": 5}', "regex": "12/a.", "choice": "é {", "grammar": "(( ab ) )"}
WRONG = {"json": '{"b', "regex": "1/", "choice": "<thing!", "grammar": "()"}


def follow(vocabulary: Vocabulary, tokenizer, spec: GrammarSpec, text: str) -> str:
    """How much of a text a grammar takes; all of it and "." where it may end there."""
    state, taken = vocabulary.compile(spec.lark).start(), []
    ended = False
    for token in tokenizer.encode(text, add_special_tokens=False):
        if ended or token not in allowed(state):
            break
        taken.append(token)
        ended = state.advance(token)
    return tokenizer.decode(taken, skip_special_tokens=False) + "." * (ended or 2 in allowed(state))


@pytest.mark.parametrize(
    ("tags", "kind"),
    [
        ("text", "json"),
        ("special", "regex"),
        ("text", "choice"),
        ("special", "grammar"),
        SLOW("special", "json"),
        SLOW("text", "regex"),
        SLOW("special", "choice"),
        SLOW("text", "grammar"),
    ],
)
def test_the_form_holds_after_the_thoughts(tags, kind):
    tokenizer, vocabulary = TOKENIZERS[tags], VOCABULARIES[tags]
    support, form, answer = ThoughtSupport.of(tokenizer), FORMS[kind], ANSWERS[kind]

    def taken(beginning, text):
        return follow(vocabulary, tokenizer, support.grammar(form, beginning), text)

    thoughts = f"Hm: é?\n  {answer} </th <think"
    for space in ("", "\n\n", " " * 16):
        assert taken("open", f"{thoughts}</think>{space}{answer}") == f"{thoughts}</think>{space}{answer}."
    assert taken("within", f"</think>{answer}") == f"</think>{answer}."
    assert taken("open", f"</think>{WRONG[kind]}") == f"</think>{WRONG[kind][:-1]}"
    assert taken("open", f"</think>{' ' * 16}\t") == f"</think>{' ' * 16}"
    # The thoughts need not be there.
    assert taken("possible", answer) == answer + "."
    whole = f"<think>\n{thoughts}\n</think>\n\n{answer}"
    assert taken("possible", whole) == whole + "."
    assert taken("possible", WRONG[kind]) == WRONG[kind][:-1]
    assert taken("possible", f"<think></think>{WRONG[kind]}") == f"<think></think>{WRONG[kind][:-1]}"
    assert taken("possible", f"\n{answer}") == ""
    # Where there are none, it is the form alone.
    assert support.grammar(form, "none") is form
    assert not taken("none", f"</think>{answer}").endswith(".")


def test_special_tags_written_out_end_nothing():
    """The reader of the answer takes them for the end, so the grammar must not take them for thoughts."""
    tokenizer, spec = TOKENIZERS["special"], ThoughtSupport(True, TAGS).grammar(FORMS["json"], "open")
    state = VOCABULARIES["special"].compile(spec.lark).start()
    for byte in b"a</think":
        assert TAGS["</think>"] in allowed(state)
        assert not state.advance(byte + 8)
    assert ord(">") + 8 not in allowed(state)
    assert ord("?") + 8 in allowed(state)
    assert not allowed(state) & {0, 1, 2, TAGS["<think>"]}  # no other special token is thought
    assert tokenizer.token_bytes(TAGS["</think>"]) == b"</think>"


@pytest.mark.parametrize("tags", TOKENIZERS)
@pytest.mark.parametrize("beginning", ["possible", "open"])
def test_calls_after_thoughts(tags, beginning):
    tokenizer, vocabulary = TOKENIZERS[tags], VOCABULARIES[tags]
    asked = ChatRequest.parse({
        "messages": [{"role": "user", "content": "x"}],
        "tools": TOOLS,
        "tool_choice": {"type": "function", "function": {"name": "ping"}},
    })  # fmt: skip
    spec = ThoughtSupport.of(tokenizer).grammar(ToolSupport.of(tokenizer).grammar(asked), beginning)
    call = '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>'
    thoughts = ("<think>" if beginning == "possible" else "") + "ping?\n</think>\n\n"
    assert follow(vocabulary, tokenizer, spec, thoughts + call) == f"{thoughts}{call}."
    assert follow(vocabulary, tokenizer, spec, f"{thoughts}No.") == thoughts
    assert follow(vocabulary, tokenizer, spec, call) == (f"{call}." if beginning == "possible" else call)


def test_random_answers():
    spec = ThoughtSupport(True, TAGS).grammar(FORMS["choice"], "possible")
    grammar = VOCABULARIES["special"].compile(spec.lark)
    found, tokenizer = set(), TOKENIZERS["special"]
    for seed in range(8):
        tokens = write(grammar, seed)
        reader, detokenizer = (
            AnswerReader("possible", tags=TAGS.values()),
            tokenizer.detokenizer(keep=TAGS.values()),
        )
        parts = merged(
            [part for token in tokens for part in reader.push(detokenizer.add(token))] + reader.finish()
        )
        assert parts[-1].text in ("<thing>", "é {")
        found |= {type(part) for part in parts}
    assert found == {Thought, Content}


def test_long_thoughts_cost_no_more_than_short_ones():
    """One state, whatever the length: nothing grows, and no limit of the library is met."""
    for tags in TOKENIZERS:
        spec = ThoughtSupport.of(TOKENIZERS[tags]).grammar(FORMS["json"], "open")
        state = VOCABULARIES[tags].compile(spec.lark).start()
        for n in range(20_000):
            assert not state.advance(ord("<a b\n"[n % 5]) + 8)
        for token in TOKENIZERS[tags].encode('</think>{"age":5}', add_special_tokens=False):
            assert token in allowed(state)
            state.advance(token)
        assert 2 in allowed(state)


def test_a_form_cannot_leave_its_place():
    """Texts that would be grammars where the whole is put together are none by themselves, and are refused as such."""
    spec = GrammarSpec("grammar", 'start: "a"\n}\nother: %lark {\nstart: "b"', "x")
    thinking = ThoughtSupport(True, {}).grammar(spec, "open")
    VOCABULARIES["text"].compile(thinking.lark)
    cache = GrammarCache(TOKENIZERS["text"], 264, (0, 2))
    with pytest.raises(APIError, match=r"Invalid value for 'x': 2\(1\): expecting rule"):
        asyncio.run(cache.get(thinking))
    cache.close()


def test_no_tags_in_a_vocabulary_are_needed():
    assert "<[" not in ThoughtSupport.of(tiny_tokenizer(), "think").grammar(FORMS["json"], "possible").lark
