"""Arguments of calls as models write them: what becomes JSON on the way out, and what is read of the rest."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.arguments import Escapes, object_of
from tests.serve.test_http_text import cut


def escaped(*pieces: str) -> str:
    escapes = Escapes()
    return "".join(map(escapes.push, pieces))


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ('{"a":\n\t"b",\r\n"c": [1]}', None),  # white space between the parts of JSON
        ('{"a": "b\nc\td\r\x00\x1f\x7f"}', r'{"a": "b\nc\td\r\u0000\u001f' + '\x7f"}'),
        ('{"a\n": ["\n"]}\n', r'{"a\n": ["\n"]}' + "\n"),
        (r'{"a": "\n\\\"\u0041"}', None),
        ('{"a": "\\"\n"}', r'{"a": "\"\n"}'),
        ('{"a": "b \\\n c"}', r'{"a": "b \\\n c"}'),  # a line of a shell's that goes on
        ('{"a": "b\n', r'{"a": "b\n'),
    ],
)
def test_control_characters_in_strings_become_escapes(written, told):
    assert escaped(written) == escaped(*written) == (written if told is None else told)


TEXT = st.text(st.sampled_from('ab"\\\n\t{}[]:,\x00é'))


@given(TEXT, st.lists(st.integers(0, 99), max_size=6))
def test_any_cutting_is_escaped_the_same(text, cuts):
    assert escaped(*cut(text, cuts)) == escaped(text)


@given(st.dictionaries(TEXT, TEXT))
def test_json_stays_as_it_is(value):
    """And strings whose control characters are written as they are say the same."""
    for indent in (None, 2):
        text = json.dumps(value, indent=indent)
        assert escaped(text) == text and object_of(text) == value
    bare = json.dumps(value, ensure_ascii=False)
    for escape, char in ((r"\n", "\n"), (r"\t", "\t"), (r"\u0000", "\x00")):
        if "\\\\" not in bare:
            bare = bare.replace(escape, char)
    assert json.loads(escaped(bare)) == object_of(bare) == value


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"code": "a\nb\tc"}', {"code": "a\nb\tc"}),
        ('{"code": "a', {"code": "a"}),
        ('{"code": "a\n', {"code": "a\n"}),
        ('{"a": 1, "b', {"a": 1}),
        ("{", {}),
        ('{"x": "a\nb", "y": NaN}', None),
        ('{"a": "\\ud800"}', None),
        ('{"a": 1,}', None),
        ("{'a': 1}", None),
        ("[1]", None),
        ("[" * 10_000, None),
        ("", None),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_what_is_read(arguments, expected):
    assert object_of(arguments) == expected
