"""Conversations and pairs from their files to batches, from stores of tokens and of text."""

import random

import numpy as np
import pytest
from chatting import mix

from jaxthru.data.loading.dataset import Data, DataConfig, open_data

WORDS = ("the", "row", "store", "a", "token", "<|im_end|>", "é")
TRANSFORM = """
import json

def without_greeting(text):
    talk = json.loads(text)
    for message in talk.get("messages", ()):
        message["content"] = message["content"].removeprefix("Hello! ")
    return json.dumps(talk)
"""


def talks(count: int) -> list[dict]:
    draw = random.Random(0)
    say = lambda: " ".join(draw.choices(WORDS, k=draw.randint(1, 9)))  # noqa: E731
    found = [
        {
            "messages": [
                {"role": role, "content": f"Hello! {say()} {number}"}
                for role in ("user", "assistant") * draw.randint(1, 2)
            ]
        }
        for number in range(count)
    ]
    return [*found, {"prompt": "the row: ", "completion": "a token"}, {"text": "the store the row"}]


@pytest.fixture
def opened(tmp_path):
    """Opens a mix of rows, and ends its workers after the test."""
    made = []

    def open_(rows, **keys) -> Data:
        path = mix(tmp_path, rows, **keys)
        config = DataConfig(str(path), sequence=256, store=str(tmp_path / "store"), loaders=2)
        made.append(open_data(config))
        return made[-1]

    yield open_
    for data in made:
        data.close()


def batches(data: Data, **asked) -> list[dict[str, np.ndarray]]:
    keys = {"seed": 0, "rows": 4, "steps": 6} | asked
    with data.train_batches(((0, data.mixture),), **keys) as found:
        return list(found)


@pytest.mark.parametrize("transform", [False, True])
def test_conversations_tokenised_online_are_those_of_a_token_store(opened, tmp_path, transform):
    (tmp_path / "greet.py").write_text(TRANSFORM)
    keys = {"transform": "greet:without_greeting"} if transform else {}
    stored, online = opened(talks(60), **keys), opened(talks(60), online=True, **keys)
    assert online.workers and not stored.workers and online.keys == stored.keys
    assert online.counted == stored.counted and online.counted["chats"].kept == 62
    for one, other in zip(batches(stored), batches(online), strict=True):
        assert all(np.array_equal(one[name], other[name]) for name in one)
        assert 0 < one["loss_mask"].sum() < (one["segment_ids"] > 0).sum()
    said = "".join(stored.tokenizer.decode(batch["tokens"].ravel()) for batch in batches(stored))
    assert ("Hello!" in said) != transform and "<|im_end|>" in said


def test_each_chosen_answer_is_followed_by_the_rejected_one(opened):
    rows = [
        {"prompt": f"the row {number}?", "chosen": f"a token {number}", "rejected": f"no store {number} é"}
        for number in range(40)
    ]
    data = opened(rows, recipe="local_pairs")
    assert data.counted["chats"] == (40, 0, 0, 0) and "40 of 40 pairs" in data.account[0]
    seen = set()
    for batch in batches(data, rows=1, steps=data.train[0][1].rows):
        segments, tokens = batch["segment_ids"][0], batch["tokens"][0]
        assert segments.max() % 2 == 0
        for first in range(1, segments.max() + 1, 2):
            texts, answers = [], []
            for segment in (first, first + 1):
                where = np.flatnonzero(segments == segment)
                texts.append(data.tokenizer.decode(tokens[where]))
                counted = where[batch["loss_mask"][0, where] == 1]
                answers.append(data.tokenizer.decode(batch["targets"][0, counted]))
            number = int(texts[0].split("?")[0].split()[-1])
            assert f"the row {number}?" in texts[0] and f"the row {number}?" in texts[1]
            assert answers[0].startswith(f"a token {number}") and answers[1].startswith(
                f"no store {number} é"
            )
            seen.add(number)
    assert seen == set(range(40))
