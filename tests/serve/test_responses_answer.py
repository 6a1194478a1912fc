"""The items of a response, whatever pieces its parts come in, and events that add up to them."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from serve.choice import Delta
from serve.parts import Arguments, CallStart, Content, Part, Thought
from serve.responses import Answer

PIECES = st.lists(st.text("ab{}\n", max_size=3), max_size=4)


@st.composite
def answers(draw) -> list[Part]:
    """Thoughts, text and calls in any order, in pieces; calls are numbered."""
    parts: list[Part] = []
    calls = 0
    for kind in draw(st.lists(st.sampled_from(["thought", "text", "call"]), max_size=6)):
        pieces = draw(PIECES)
        if kind == "call":
            parts.append(CallStart(calls, f"f{calls}", f"call_{calls}"))
            parts += [Arguments(calls, piece) for piece in pieces]
            calls += 1
        else:
            parts += [(Thought if kind == "thought" else Content)(piece) for piece in pieces]
    return parts


def run(deltas: list[Delta]) -> tuple[list[dict], list[dict]]:
    answer = Answer(None)
    events = [event for delta in deltas for event in answer.feed(delta)]
    return answer.items, events


def without_ids(items: list[dict]) -> list[dict]:
    return [{key: value for key, value in item.items() if key != "id"} for item in items]


@settings(max_examples=200)
@given(answers(), st.data(), st.sampled_from(["stop", "length"]))
def test_pieces_make_the_same_items_and_events_that_add_up(parts, data, reason):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(parts)), max_size=5)))
    places = [0, *cuts, len(parts)]
    deltas = [Delta(parts=parts[a:b]) for a, b in itertools.pairwise(places)]
    deltas[-1].finish_reason = reason
    whole, _ = run([Delta(parts=parts, finish_reason=reason)])
    items, events = run(deltas)
    assert without_ids(items) == without_ids(whole)
    assert len({item["id"] for item in items}) == len(items) >= 1
    assert [item["status"] for item in items[:-1]] == ["completed"] * (len(items) - 1)
    assert items[-1]["status"] == ("completed" if reason == "stop" else "incomplete")
    said = {
        "reasoning": "".join(p.text for p in parts if isinstance(p, Thought)),
        "message": "".join(p.text for p in parts if isinstance(p, Content)),
        "function_call": "".join(p.text for p in parts if isinstance(p, Arguments)),
    }
    for kind, text in said.items():
        found = [item for item in items if item["type"] == kind]
        shown = [
            item.get("arguments", "".join(part["text"] for part in item.get("content", ()))) for item in found
        ]
        assert "".join(shown) == text
    for index, item in enumerate(items):
        own = [event for event in events if event["output_index"] == index]
        kinds = [event["type"].split(".")[-2:] for event in own]
        assert kinds[0] == ["output_item", "added"] and kinds[-1] == ["output_item", "done"]
        assert kinds.count(["output_item", "added"]) == 1 == kinds.count(["output_item", "done"])
        assert own[0]["item"]["status"] == "in_progress" and own[-1]["item"] is item
        assert {event.get("item_id", item["id"]) for event in own} == {item["id"]}
        text = item.get("arguments", "".join(part["text"] for part in item.get("content", ())))
        assert "".join(event.get("delta", "") for event in own) == text
        done = [event for event in own if event["type"].endswith(("_text.done", "_arguments.done"))]
        assert [event.get("text", event.get("arguments")) for event in done] == [text] * bool(
            text or "name" in item
        )
    order = [event["output_index"] for event in events]
    assert order == sorted(order)
