"""The items of a response and the blocks of a message, whatever pieces they come in, and events that add up to them."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from serve import anthropic
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


@st.composite
def cut_answers(draw) -> tuple[list[Part], list[Delta]]:
    """Parts, and the same in several deltas."""
    parts = draw(answers())
    cuts = sorted(draw(st.lists(st.integers(0, len(parts)), max_size=5)))
    deltas = [Delta(parts=parts[a:b]) for a, b in itertools.pairwise([0, *cuts, len(parts)])]
    deltas[-1].finish_reason = draw(st.sampled_from(["stop", "length"]))
    return parts, deltas


@settings(max_examples=200)
@given(cut_answers())
def test_pieces_make_the_same_items_and_events_that_add_up(given):
    parts, deltas = given
    reason = deltas[-1].finish_reason
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


def test_an_answer_that_breaks_off_has_what_there_was():
    answer = Answer(None)
    for text in ("a", "b"):
        list(answer.feed(Delta(parts=[Content(text)])))
    *_, last = answer.end("incomplete")
    assert last["type"] == "response.output_item.done" and not list(answer.end("incomplete"))
    (item,) = answer.items
    assert (item["status"], item["content"][0]["text"]) == ("incomplete", "ab")


@settings(max_examples=200)
@given(cut_answers())
def test_pieces_make_the_same_blocks_and_events_that_add_up(given):
    parts, deltas = given
    answer, whole = anthropic.Answer(), anthropic.Answer()
    events = [event for delta in deltas for event in answer.feed(delta)]
    list(whole.feed(Delta(parts=parts, finish_reason=deltas[-1].finish_reason)))
    assert answer.blocks == whole.blocks and answer.ending == whole.ending
    for index, block in enumerate(answer.blocks):
        first, *deltas_of, last = [event for event in events if event["index"] == index]
        assert (first["type"], last["type"]) == ("content_block_start", "content_block_stop")
        assert first["content_block"]["type"] == block["type"]
        if block["type"] == "thinking":
            signed = deltas_of.pop()["delta"]
            assert (
                signed == {"type": "signature_delta", "signature": block["signature"]} and block["signature"]
            )
        text = "".join(next(v for k, v in e["delta"].items() if k != "type") for e in deltas_of)
        if block["type"] == "tool_use":
            number = int(block["id"].removeprefix("call_"))
            assert text == "".join(p.text for p in parts if isinstance(p, Arguments) and p.number == number)
        else:
            assert text == block[block["type"]] != ""
    assert [event["index"] for event in events] == sorted(event["index"] for event in events)
    texts = ["".join(b.get(kind, "") for b in answer.blocks) for kind in ("thinking", "text")]
    assert texts == ["".join(p.text for p in parts if isinstance(p, kind)) for kind in (Thought, Content)]
