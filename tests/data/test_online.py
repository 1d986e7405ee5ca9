"""A source tokenised while training gives the very batches of its token store."""

import numpy as np

from jaxthru.data.loader import DataConfig, open_data
from jaxthru.data.schedule import Mixing


def batches(mix, store, *, steps=12, **settings):
    data = open_data(DataConfig(mix=str(mix), store=str(store), sequence=64, **settings))
    schedule = tuple((step, Mixing.plain({"books": 4.0 - b, "notes": b})) for step, b in ((0, 1.0), (6, 3.0)))
    with data.train_batches(schedule, seed=0, rows=8, steps=steps) as found:
        found = list(found)
    held_out = data.held_out_batches(total_rows=8, rows=4)
    if data.loaders:
        data.loaders.close()
    return data, [*found, *held_out]


def test_the_batches_are_those_of_a_token_store(mix, tmp_path):
    _, expected = batches(mix, tmp_path / "store")
    text = mix.read_text().replace("weight = 3", "weight = 3\nonline = true")
    mix.write_text(text)
    for loaders in (1, 3):
        for packing in ("split", "best_fit"):
            data, found = batches(mix, tmp_path / "store", loaders=loaders, packing=packing)
            if packing == "best_fit":
                continue
            assert data.loaders.sources == ("books",)
            for one, other in zip(expected, found, strict=True):
                assert all(np.array_equal(one[name], other[name]) for name in one)


def test_a_store_of_text_has_the_key_of_the_tokens(mix, tmp_path):
    """So a run may be resumed with one in place of the other."""
    plain, _ = batches(mix, tmp_path / "store", steps=1)
    mix.write_text(mix.read_text().replace("weight = 3", "weight = 3\nonline = true"))
    online, _ = batches(mix, tmp_path / "store", steps=1)
    assert plain.keys == online.keys


def test_a_transform_changes_the_text(mix, tmp_path, monkeypatch):
    (tmp_path / "shouting.py").write_text("def shout(text):\n    return text.upper()\n")
    monkeypatch.syspath_prepend(tmp_path)
    for line in ("", "\nonline = true"):
        mix.write_text(
            mix.read_text().replace("weight = 1", f'weight = 1\ntransform = "shouting:shout"{line}', 1)
        )
        data, found = batches(mix, tmp_path / "store", steps=2)
        for batch in found:
            tokens = batch["tokens"][(batch["source"] == 1) & (batch["segment_ids"] > 0)]
            text = data.prepared.tokenizer.decode(tokens).replace("<|endoftext|>", "")
            assert text.upper() == text
        mix.write_text(mix.read_text().replace(f'\ntransform = "shouting:shout"{line}', ""))
