"""Conversations and pairs are read from every usual form of record; whatever is none says why."""

import json
import re

import pytest
from chatting import HELLO
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxthru.data.sources.chat.records import from_canonical, from_record
from jaxthru.data.sources.record import Damage, Document, Place

PLACE = Place("file", "line 1")
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


def read(record, kind="conversations"):
    found = from_record(record, PLACE, kind)
    assert isinstance(found, Document), found
    assert from_canonical(found.text, kind) == json.loads(found.text)
    return json.loads(found.text)


def reason(record, kind="conversations") -> str:
    found = from_record(record, PLACE, kind)
    assert isinstance(found, Damage), found
    assert (found.file, found.position) == PLACE
    return found.reason


@pytest.mark.parametrize(
    "record",
    [
        {"messages": HELLO, "id": 5},
        {"messages": json.dumps(HELLO)},  # as tables have nested columns
        {"conversations": [{"from": "human", "value": "Hello?"}, {"from": "gpt", "value": "A row."}]},
        {"conversation": HELLO, "text": None},
        {"messages": [message | {"tool_calls": None, "name": None} for message in HELLO]},
        {"messages": [HELLO[0] | {"content": [{"type": "text", "text": "Hello?"}]}, HELLO[1]], "tools": []},
        {"prompt": "Hello?", "completion": HELLO[1:]},
        {"prompt": HELLO[:1], "completion": "A row."},
        {"prompt": HELLO[:1], "completion": HELLO[1]},
        {"prompt": json.dumps(HELLO[:1]), "completion": json.dumps(HELLO[1:])},
        {"prompt": json.dumps([{"from": "human", "value": "Hello?"}]), "completion": "A row."},
    ],
)
def test_one_conversation_is_one_text_however_it_was_written_down(record):
    assert read(record) == {"messages": HELLO}


def test_what_a_record_holds_beside_words_is_kept():
    messages = [
        {"role": "system", "content": "Be brief."},
        *HELLO[:1],
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [CALL]},
        {"role": "tool", "content": "2", "tool_call_id": "x"},
        {"role": "assistant", "content": "Two.", "weight": 0},
    ]
    tools = [{"type": "function", "function": {"name": "add"}}]
    assert read({"messages": messages, "tools": tools}) == {"messages": messages, "tools": tools}
    assert read({"messages": messages, "tools": json.dumps(tools)}) == {"messages": messages, "tools": tools}
    as_text = [{"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}]
    called = [HELLO[0], {"role": "assistant", "content": None, "tool_calls": as_text}]
    assert read({"messages": called})["messages"][1] == {"role": "assistant", "tool_calls": [CALL]}
    spoken = [{"from": "observation", "value": "2"}, {"from": "assistant", "value": "Two.", "weight": 1}]
    assert read({"conversations": spoken})["messages"] == [
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "Two."},
    ]


def test_of_a_prompt_and_its_completion_the_completion_is_trained_on():
    assert read({"prompt": "a ", "completion": "b"}) == {"prompt": "a ", "completion": "b"}
    prompt = [*HELLO, {"role": "user", "content": "And?"}]
    found = read({"prompt": prompt, "completion": "Yes."})["messages"]
    assert [message.get("weight") for message in found] == [None, 0, None, None]
    assert read({"text": "plain"}) == {"text": "plain"}
    own = {"prompt": "As JSON: a, b", "completion": '[{"role": "letter"}]'}  # which holds no messages
    assert read(own) == own


def test_pairs_have_a_prompt_or_begin_alike():
    good, bad = {"role": "assistant", "content": "A row."}, {"role": "assistant", "content": "No."}
    expected = {"chosen": {"messages": [HELLO[0], good]}, "rejected": {"messages": [HELLO[0], bad]}}
    assert read({"prompt": "Hello?", "chosen": [good], "rejected": bad}, "pairs") == expected
    assert read({"prompt": HELLO[:1], "chosen": "A row.", "rejected": "No."}, "pairs") == expected
    assert read({"chosen": [HELLO[0], good], "rejected": [HELLO[0], bad]}, "pairs") == expected
    as_text = {"chosen": json.dumps([HELLO[0], good]), "rejected": json.dumps([HELLO[0], bad])}
    assert read(as_text, "pairs") == expected  # as tables have nested columns
    assert read({"prompt": json.dumps(HELLO[:1]), "chosen": "A row.", "rejected": "No."}, "pairs") == expected
    texts = {"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5"}
    found = read(texts, "pairs")
    assert found["chosen"] == {"prompt": "2 + 2 =", "completion": " 4"}
    assert read({"chosen": "2 + 2 = 4", "rejected": "2 + 2 = 5"}, "pairs") == found  # whole words
    longer = [*HELLO, {"role": "user", "content": "And?"}]
    both = read({"chosen": [*longer, good], "rejected": [*longer, bad]}, "pairs")
    assert [message.get("weight") for message in both["rejected"]["messages"]] == [None, 0, None, None]


@pytest.mark.parametrize(
    ("record", "why"),
    [
        ([], "a list where a record should be"),
        ({"body": 1}, "no conversation: looked for 'messages', .* or 'text'; its keys: 'body'"),
        ({"prompt": "a"}, "no conversation: looked for"),
        ({"messages": []}, "no messages under 'messages'"),
        ({"messages": "hello"}, "no messages under 'messages'"),
        ({"messages": ["hello"]}, r"messages\[0\] is no message, but a str"),
        ({"messages": [{"content": "a"}]}, r"messages\[0\] has neither 'role' nor 'from'"),
        (
            {"messages": [{"role": "bot", "content": "a"}]},
            r"\[0\] has the role 'bot'; known are system, user, a",
        ),
        ({"messages": [{"role": 5, "content": "a"}]}, "has the role '5'"),
        ({"conversations": [{"from": "bing", "value": "a"}]}, "has the role 'bing'; known are human, gpt"),
        ({"messages": [*HELLO, {"role": "user"}]}, r"messages\[2\] has no text as its content"),
        ({"messages": [{"role": "user", "content": 5}]}, r"messages\[0\] has no text as its content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
            "has a part of type 'image_url': only text is read",
        ),
        (
            {"messages": [HELLO[1] | {"weight": 0.5}]},
            "has weight = 0.5: 0 leaves it out of the loss, 1 does not",
        ),
        ({"messages": [HELLO[1] | {"tool_calls": "add"}]}, "tool_calls is no list"),
        ({"messages": [HELLO[1] | {"tool_calls": ["add"]}]}, "tool_calls holds a str"),
        ({"messages": HELLO, "tools": 5}, "tools is no list"),
        ({"text": 5}, "no text under 'text'"),
        ({"chosen": "a", "rejected": "b"}, "a pair .*: the recipe needs records = 'pairs'"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "not valid Unicode"),
    ],
)
def test_what_is_no_conversation_says_why(record, why):
    assert re.search(why, reason(record))


@pytest.mark.parametrize(
    ("record", "why"),
    [
        ({"chosen": "a"}, "a pair needs 'chosen' and 'rejected', and has no 'rejected'; its keys: 'chosen'"),
        ({"prompt": "a", "chosen": "b", "rejected": None}, "has no 'rejected'"),
        ({"prompt": "a", "chosen": "b", "rejected": ""}, "a pair whose 'rejected' holds no answer"),
        (
            {"prompt": HELLO[:1], "chosen": HELLO[1:], "rejected": HELLO[:1]},
            "whose 'rejected' holds no answer",
        ),
        ({"chosen": HELLO, "rejected": HELLO[:1]}, "whose 'rejected' holds no answer"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "a pair whose two answers are the same"),
        ({"chosen": HELLO, "rejected": HELLO}, "a pair whose two answers are the same"),
    ],
)
def test_what_is_no_pair_says_why(record, why):
    assert why in reason(record, "pairs")


NAMES = "messages conversations prompt completion chosen rejected text tools role content from value weight"
KEYED = st.sampled_from(NAMES.split())
WORDS = st.sampled_from(
    ["user", "assistant", "human", "gpt", "Hello?", "", "\ud800", '[{"role": "user"}]', "[["]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(0, 2) | st.floats() | WORDS | st.binary(max_size=2),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYED | st.integers(), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(VALUES | st.dictionaries(KEYED, VALUES, max_size=4), st.sampled_from(["conversations", "pairs"]))
def test_whatever_a_record_holds_it_is_a_conversation_or_damage(record, kind):
    found = from_record(record, PLACE, kind)
    if isinstance(found, Document):
        again = from_canonical(found.text, kind)
        assert json.dumps(again, ensure_ascii=False) == found.text
    else:
        assert found.reason and found[:2] == PLACE


def test_what_is_nested_too_deeply_is_damage():
    deep = []
    for _ in range(5000):
        deep = [deep]
    assert reason({"messages": HELLO, "tools": [deep]}) == "nested too deeply"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "returned what is not valid JSON"),
        ("[]", "returned JSON that is no object"),
        ('{"messages": []}', "no messages under 'messages'"),
    ],
)
def test_a_transform_may_return_no_conversation(text, why):
    with pytest.raises(ValueError, match=why):
        from_canonical(text, "conversations")


def test_a_transform_may_return_half_a_pair():
    with pytest.raises(ValueError, match="a pair without its 'rejected'"):
        from_canonical('{"chosen": {"messages": []}}'.replace("[]", json.dumps(HELLO)), "pairs")
