"""What a step is given to run: chunks, packed ones and decode tokens, and nothing that only looks like them."""

import pytest

import tangram_jax as tj
from tests.core.stepping import CONFIG, PARAMS, SNAPKV, new_cache, plan_of, random_tokens

TOKENS = random_tokens(8)
CHUNK, DECODE = tj.Chunk(1, TOKENS, 8), tj.Decode([0], [5])


def run(chunk, decode):
    plan = plan_of("1.0", 2, 8)
    return tj.step(PARAMS, CONFIG, plan, SNAPKV, new_cache(plan), chunk, decode)


@pytest.mark.parametrize(
    ("chunk", "got"),
    [
        ((1, TOKENS, 8), "tuple of int, ndarray, int"),
        ([CHUNK, DECODE], "list of Chunk, Decode"),
        (DECODE, "Decode"),
        (TOKENS, "ndarray"),
    ],
    ids=["tuple", "list", "decode", "array"],
)
def test_what_is_no_chunk(chunk, got):
    message = rf"must be a tj\.Chunk, a tj\.Packed, a list of these, or None, got {got}; single tokens are a tj\.Decode"
    with pytest.raises(TypeError, match=message):
        run(chunk, None)


@pytest.mark.parametrize("decode", [([0], [5]), CHUNK, [DECODE], TOKENS])
def test_what_are_no_decode_tokens(decode):
    with pytest.raises(TypeError, match=rf"decode must be a tj\.Decode or None, got {type(decode).__name__}"):
        run(None, decode)


def test_nothing_to_run():
    for nothing in (None, [], ()):
        with pytest.raises(ValueError, match="a step needs a chunk, decode tokens, or both"):
            run(nothing, None)


def test_texts_of_plain_numbers():
    packed = tj.Packed.of([1, 2, 0], [[9, 8], [], [7]], 16)
    assert packed.tokens.tolist() == [9, 8, *[0] * 6, 7, *[0] * 7]
    assert (packed.tokens.dtype.kind, packed.rows.tolist()) == ("i", [1, 2, 0])
    assert packed.counts.tolist() == [2, 0, 1]


@pytest.mark.parametrize(("rows", "texts"), [([], []), ([1], []), ([1, 2], [TOKENS]), ([], [TOKENS])])
def test_rows_and_texts_of_others(rows, texts):
    message = f"{len(rows)} rows and {len(texts)} texts: expected as many of both, and one at least"
    with pytest.raises(ValueError, match=message):
        tj.Packed.of(rows, texts, 16)
