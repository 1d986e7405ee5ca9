"""Documents that say what of them is trained on: from their spans to the loss mask of every batch."""

import dataclasses
import re

import numpy as np
import pytest
from corpus import sides
from marking import mark, spans

from jaxthru.data.loading.dataset import Data, DataConfig, open_data
from jaxthru.data.mixture.configuration import Mixture
from jaxthru.data.sources.record import Document, Place
from jaxthru.data.store import chunks, flat_file, writer
from jaxthru.runtime.errors import InputError

SEQUENCE, ROWS = 64, 8


@pytest.fixture
def opened(mix, tmp_path, monkeypatch):
    """Opens the mix, whose notes say what is trained on, and ends its workers after the test."""
    mark(monkeypatch)
    monkeypatch.setattr(writer, "SHARD_BYTES", 4000)
    made = []

    def open_(online=False, **settings) -> Data:
        path = mix.with_name("online.toml")
        path.write_text(
            mix.read_text().replace("weight =", "online = true\nweight =" if online else "weight =")
        )
        config = DataConfig(str(path), **{"sequence": SEQUENCE, "store": str(tmp_path / "store")} | settings)
        made.append(open_data(config))
        return made[-1]

    yield open_
    for data in made:
        data.close()


def batches(data: Data, weights=None, **asked) -> list[dict[str, np.ndarray]]:
    schedule = ((0, Mixture.plain(weights) if weights else data.mixture),)
    keys = {"seed": 1, "rows": ROWS, "steps": 12} | asked
    with data.train_batches(schedule, **keys) as found:
        return list(found)


def assert_same(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        assert all(np.array_equal(one[name], other[name]) for name in one)


def pieces(batch, source):
    """Yields (tokens, loss mask, targets) of each segment of a source."""
    for row in range(len(batch["tokens"])):
        segments = batch["segment_ids"][row]
        for segment in range(1, segments.max() + 1) if batch["source"][row, 0] == source else ():
            where = segments == segment
            yield tuple(batch[name][row][where] for name in ("tokens", "loss_mask", "targets"))


def expected_masks(data, texts):
    """Returns {token ids: bool per token}, by the spans of each text and by no code of the stores."""
    documents = [Document.of(text, Place("", ""))._replace(trained=spans(text)) for text in texts]
    encoded = data.tokenizer.encode_documents(documents)
    return {tuple(each.ids.tolist()): each.trained for each in encoded}


@pytest.mark.parametrize("packing", ["split", "best_fit"])
def test_every_token_counts_that_a_span_covers_and_no_other(opened, tmp_path, packing):
    """In one epoch of each split each document that fits is found once, whole, with its own mask."""
    data = opened(packing=packing)
    notes = data.names.index("notes")
    for split, texts in sides(tmp_path)["notes"].items():
        masks = expected_masks(data, texts)
        if split == "train":
            found = batches(data, {"notes": 1.0}, rows=1, steps=data.train[notes][1].rows)
        else:
            found = data.held_out_batches(total_rows=10**6, rows=4)
        seen = {}
        for batch in found:
            for tokens, mask, targets in pieces(batch, notes):
                assert (targets[:-1] == tokens[1:]).all() and targets[-1] == 0
                seen[tuple(tokens.tolist())] = mask
        fitting = {ids: mask for ids, mask in masks.items() if len(ids) <= SEQUENCE and mask[1:].any()}
        assert seen.keys() == fitting.keys() and 0 < len(fitting) < len(masks)
        for ids, mask in seen.items():
            assert mask.tolist() == [*fitting[ids][1:].astype(float), 0.0]
        if split == "train":
            counted = data.counted["notes"]
            untrained = sum(not mask[1:].any() for mask in masks.values())
            assert counted == (len(masks), len(masks) - untrained - len(fitting), 0, untrained)
            assert data.tokens["notes"] == sum(map(len, fitting))


@pytest.mark.parametrize("over_long", ["truncate", "cut"])
def test_what_is_longer_than_a_row_is_truncated_or_cut_as_asked(opened, tmp_path, over_long):
    data = opened(over_long=over_long)
    notes = data.names.index("notes")
    masks = expected_masks(data, sides(tmp_path)["notes"]["train"])
    found = batches(data, {"notes": 1.0}, rows=1, steps=data.train[notes][1].rows)
    seen = [piece[:2] for batch in found for piece in pieces(batch, notes)]
    expected = []
    for ids, mask in masks.items():
        kept = min(len(ids), SEQUENCE) if over_long == "truncate" else len(ids)
        counts = [*mask[1:kept].astype(float), 0.0]
        if any(counts):
            for begin in range(0, kept, SEQUENCE):
                piece = slice(begin, min(begin + SEQUENCE, kept))
                expected.append((ids[piece], tuple(counts[piece])))
    assert sorted((tuple(tokens.tolist()), tuple(mask.tolist())) for tokens, mask in seen) == sorted(expected)
    assert any(len(ids) > SEQUENCE for ids in masks)


def test_text_beside_conversations_is_packed_as_ever(opened, mix, monkeypatch):
    marked = opened()
    monkeypatch.undo()
    plain = open_data(dataclasses.replace(marked.config, mix=str(mix)))
    assert marked.counted["books"] is None
    assert_same(*(batches(data, {"books": 1.0}) for data in (marked, plain)))


def test_batches_are_the_same_online_resumed_and_in_any_division_into_processes(
    opened, tmp_path, monkeypatch
):
    """Also where some texts are kept as tokens, with what of them is trained on."""
    whole = batches(opened(), cost=(1.0, 1.0))
    held_out = {"total_rows": 8, "rows": 4}
    expected_held_out = opened().held_out_batches(**held_out)
    for loaders, processes, online, most in ((1, 4, False, 0), (2, 2, True, 10**6), (2, 2, True, 50)):
        monkeypatch.setattr(chunks, "KEEP_TOKENS", most)
        data = opened(online, loaders=loaders, store=str(tmp_path / f"store-{most}"))
        assert bool(data.workers) == online
        kept = {path.name.partition("-")[0] for path in (tmp_path / f"store-{most}").glob("*/*.kept")}
        assert kept == ({"train", "held_out"} if most == 50 else set())
        each = ROWS // processes
        slices = [slice(at, at + each) for at in range(0, ROWS, each)]
        parts = [batches(data, cost=(1.0, 1.0), start=loaders, local_rows=local) for local in slices]
        joined = [
            {name: np.concatenate([part[name] for part in step]) for name in step[0]}
            for step in zip(*parts, strict=True)
        ]
        assert_same(joined, whole[loaders:])
        assert_same(data.held_out_batches(**held_out), expected_held_out)


def test_a_store_of_text_has_no_column_for_it(opened):
    stores = opened().prepared.stores
    columns = {name: {path.suffix for path in opened.folder.iterdir()} for name, opened in stores.items()}
    assert columns["books"] == {".tokens", ".offsets", ".json", ".columns"}
    assert columns["notes"] == columns["books"] | {".trained", ".targets"}
    shard = stores["books"].manifest["shards"][0]["splits"]["train"]
    assert shard.keys() == {"documents", "tokens", "tokens_crc32", "offsets_crc32"}
    assert "unit" not in stores["notes"].manifest


@pytest.mark.parametrize(("online", "name"), [(False, "trained"), (False, "targets"), (True, "targets")])
def test_damage_to_what_is_trained_on_is_named(opened, online, name):
    store = opened(online).prepared.stores["notes"]
    path = sorted(store.folder.glob(f"train-*.{name}"))[0]
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(InputError, match=rf"{path.name}: block 0 .* is damaged; {flat_file.REMEDY}"):
        opened(online).prepared.stores["notes"].verify()


def test_a_shard_in_which_all_is_trained_on_lies_beside_one_that_says(tmp_path, mix, monkeypatch):
    """A source may say it of some documents alone."""
    mark(monkeypatch)
    monkeypatch.setattr(writer, "SHARD_BYTES", 1500)
    read = writer.Corpus.items

    def half(self):
        for number, item in enumerate(read(self)):
            yield item._replace(trained=None) if number < 30 else item

    monkeypatch.setattr(writer.Corpus, "items", half)
    data = open_data(DataConfig(str(mix), sequence=512, store=str(tmp_path / "store")))
    split, shards = data.train[1][0], data.prepared.stores["notes"].manifest["shards"]
    assert 0 < sum("trained_crc32" in shard["splits"]["train"] for shard in shards) < len(shards)
    start, in_full = 0, 0
    for end, first in zip(split.ends.tolist(), split.targets.first.tolist(), strict=True):
        mask = split.read_trained(start, end)
        [[ids, *_]] = [[split.read(start, end)]]
        text = data.tokenizer.decode(ids[:-1])
        in_full += mask.all()
        assert mask.all() or tuple(mask.astype(bool)) == tuple(*expected_masks(data, [text]).values())
        assert first == (np.flatnonzero(mask[1:])[0] + 1 if mask[1:].any() else end - start)
        start = end
    assert in_full >= 15
    count = split.read_trained(0, split.tokens)
    assert split.targets.count == count.sum() - sum(count[[0, *split.ends[:-1]]])


def test_a_run_is_told_what_is_left_out_and_refused_if_that_is_all(opened):
    data = opened()
    [line] = data.account
    counted = data.counted["notes"]
    split = data.train[data.names.index("notes")][0]
    assert re.fullmatch(
        rf"source notes: {counted.kept} of {counted.documents} documents in \d+ rows, \d+\.\d% full, "
        rf"{split.targets.count / split.tokens:.1%} of all tokens trained on; left out: {counted.too_long} "
        rf"longer than data.sequence = 64, {counted.untrained} without a token to train on; truncated: 0",
        line,
    )
    with pytest.raises(InputError) as caught:
        opened(sequence=8)
    assert re.fullmatch(
        r"source notes: nothing to train on is left of its \d+ documents; left out: \d+ longer than "
        r"data.sequence = 8, \d+ without a token to train on; give a longer data.sequence, "
        "data.over_long = truncate, or another template",
        str(caught.value),
    )


def test_pairs_lie_together_and_are_left_out_together(opened, monkeypatch):
    """Each even segment is the document that followed the one before it when it was read."""
    monkeypatch.setattr("jaxthru.data.sources.keyed.Options.unit", 2)
    read, made = writer.Corpus.items, {}

    def paired(self):
        for item in read(self):
            if self.name == "books" or not isinstance(item, Document):
                yield item
                continue
            other = item._replace(text=item.text[: len(item.text) // 2] + "and the row mesh.")
            other = other._replace(trained=spans(other.text))
            made[item.text] = other.text
            yield from (item, other)

    monkeypatch.setattr(writer.Corpus, "items", paired)
    monkeypatch.setattr(writer, "BATCH_BYTES", 1)
    data = opened(sequence=128)
    notes = data.names.index("notes")
    assert data.prepared.stores["notes"].manifest["unit"] == 2
    found = batches(data, {"notes": 1.0}, rows=1, steps=data.train[notes][1].rows)
    texts = []
    for batch in found:
        segments = [data.tokenizer.decode(tokens[:-1]) for tokens, *_ in pieces(batch, notes)]
        assert len(segments) % 2 == 0 and batch["loss_mask"].any()
        texts += zip(segments[::2], segments[1::2], strict=True)
    assert len(texts) == data.counted["notes"].kept > 5
    assert all(made[chosen] == rejected for chosen, rejected in texts)
    assert re.match(r"source notes: \d+ of \d+ pairs in", data.account[0])
    with pytest.raises(InputError, match=r"data\.over_long = cut: a pair is not cut"):
        opened(sequence=128, over_long="cut")


def test_if_one_of_a_pair_is_damaged_both_are(opened, mix, monkeypatch):
    """Here by its tokens, which are known last."""
    text = mix.read_text().replace("held_out = 0.2", "held_out = 0")
    mix.write_text(text.replace("weight =", "max_damaged = 1.0\nweight ="))
    monkeypatch.setattr("jaxthru.data.sources.keyed.Options.unit", 2)
    monkeypatch.setattr("jaxthru.data.store.text_store.DOCUMENT_TOKENS", 100)
    store = opened(sequence=256).prepared.stores["notes"]
    shards = store.manifest["shards"]
    places = [int(place.split()[1]) for shard in shards for _, place, _ in shard["damage"]]
    assert len(places) == sum(shard["damaged"] for shard in shards) > 10
    damaged = set(places)
    assert damaged == {number + (1 if number % 2 else -1) for number in damaged}  # lines 1 and 2, 3 and 4 ...
    assert (np.diff(store.train.ends, prepend=0) <= 100).all() and len(store.train.ends) % 2 == 0
