"""What is drafted from the tokens that a sequence has."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.prompt_lookup import LONGEST_PAUSE, PromptLookup


def lookup(tokens: list[int], least: int = 2, most: int = 4) -> PromptLookup:
    found = PromptLookup(least, most)
    found.read(tokens)
    return found


@pytest.mark.parametrize(
    ("tokens", "count", "want"),
    [
        ([1, 2, 3, 4, 1, 2], 3, [3, 4, 1]),
        ([1, 2, 3, 9, 1, 2, 5, 9, 1, 2], 1, [5]),  # the latest of equals
        ([7, 1, 2, 3, 9, 1, 2, 5, 7, 1, 2], 2, [3, 9]),  # the longest before the latest
        ([9, 2, 3, 4, 1, 2], 3, []),  # one token alone is no match
        ([4] * 8, 3, [4, 4, 4]),  # what repeats itself goes on
        ([5, 6, 5, 6, 5, 6, 5, 6], 4, [5, 6, 5, 6]),
        ([1, 2, 3, 1, 2], 9, [3, 1, 2]),  # as much as there is
        ([1, 2, 1, 2], 0, []),
        ([3], 2, []),
        ([], 2, []),
    ],
)
def test_what_followed(tokens, count, want):
    assert lookup(tokens).following(count).tolist() == want


@given(
    st.lists(st.integers(0, 3), max_size=60),
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(0, 3),
    st.data(),
)
def test_it_is_of_the_longest_match(tokens, count, least, more, data):
    most = least + more
    found = PromptLookup(least, most)
    for end in sorted(data.draw(st.lists(st.integers(0, len(tokens)), max_size=3))):
        found.read(tokens[:end])  # read in any parts
    found.read(tokens)
    got = found.following(count).tolist()
    ends = {  # of each length of a match: the places after the matches
        n: [i for i in range(n, len(tokens)) if tokens[i - n : i] == tokens[len(tokens) - n :]]
        for n in range(least, most + 1)
    }
    matches = next((ends[n] for n in range(most, least - 1, -1) if ends[n]), [])
    assert got in [tokens[i : i + count] for i in matches] if matches else got == []
    assert not matches or len(got) == min(count, len(tokens) - matches[0])


def test_wrong_drafts_bring_pauses_that_grow():
    found, tokens = lookup([1, 2] * 4), [1, 2] * 4

    def note(right: int) -> None:
        found.sent.append((len(tokens), 3))
        found.note(right)

    pauses = []
    for _ in range(8):
        note(0)
        start = len(tokens)
        while not len(found.following(2)):
            tokens.append([1, 2][len(tokens) % 2])
            found.read(tokens)
        pauses.append(len(tokens) - start)
    assert pauses == [2, 4, 8, 16, 32, LONGEST_PAUSE, LONGEST_PAUSE, LONGEST_PAUSE]
    note(1)
    assert len(found.following(2)) == 2
    note(0)
    assert not len(found.following(2))
    tokens += [1, 2]
    found.read(tokens)
    assert len(found.following(2)) == 2


def test_drafts_after_wrong_ones_say_nothing():
    tokens = [1, 2] * 4
    found = lookup(tokens)
    found.sent.extend([(8, 4), (12, 4)])  # the second drafts are to follow three drafts and a token
    assert found.coming(8) == 8
    assert found.coming(9) == 9  # and a step without drafts
    found.note(right=0)
    found.read([*tokens, 9])
    assert found.coming(4) == 1  # those of the second step will be wrong
    found.note(right=0)
    assert not found.sent
    assert found.coming(1) == 1
    found.read([*tokens, 9, 1, 2])
    assert len(found.following(2)) == 2  # after a pause of two tokens, not of four


def test_what_it_gives_is_not_changed_by_more_tokens():
    found = lookup([1, 2, 3, 1, 2])
    first = found.following(2)
    kept = np.array(first)
    found.read([1, 2, 3, 1, 2, 8] + [9] * 3000)
    np.testing.assert_array_equal(first, kept)


def test_more_tokens_than_it_began_with_room_for():
    """Those that it knew stay: with others in their place drafts would be wrong from then on."""
    tokens = np.random.default_rng(0).integers(0, 1000, 5000).tolist()
    found = lookup(tokens[:1000])
    for count in (1024, 1025, 5000):
        found.read(tokens[:count])
        assert found.tokens.tolist() == tokens[:count]
