"""The packing kept beside a store: made once, mapped when a row is read; nothing else is read at opening."""

import contextlib
import errno
import logging
import shutil

import numpy as np
import pytest

from jaxthru.data.__main__ import main
from jaxthru.data.loading.dataset import DataConfig, open_data, prepare_data
from jaxthru.data.store import column_file, flat_file, text_store, token_store
from jaxthru.runtime.errors import InputError

SEQUENCE = 64


def columns(folder):
    """Returns {source/file: when it was written}."""
    files = {path: path.parent.name.partition("-")[0] for path in folder.rglob("*.columns")}
    return {f"{source}/{path.name}": path.stat().st_mtime_ns for path, source in files.items()}


def names(*how: str) -> set[str]:
    """Returns the files of packings of both sources."""
    splits = [f"{source}/{split}" for source in ("books", "notes") for split in ("train", "held_out")]
    return {f"{split}.{each}.columns" for split in splits for each in how}


def batches(data) -> list[dict[str, np.ndarray]]:
    with data.train_batches(((0, data.mixture),), seed=0, rows=8, steps=3, cost=(9.0, 1.0)) as found:
        return [*found, *data.held_out_batches(total_rows=8, rows=8)]


def assert_same(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert all(np.array_equal(one[name], other[name]) for name in other)


@pytest.fixture
def config(mix, tmp_path) -> DataConfig:
    return DataConfig(str(mix), SEQUENCE, "best_fit", str(tmp_path / "store"))


@pytest.mark.parametrize(("packing", "online"), [("split", False), ("best_fit", False), ("split", True)])
def test_opening_reads_nothing_of_documents_or_rows(mix, tmp_path, monkeypatch, packing, online):
    if online:
        mix.write_text(mix.read_text().replace("weight =", "online = true\nweight ="))
    config = DataConfig(str(mix), SEQUENCE, packing, str(tmp_path / "store"), loaders=1)
    keys = prepare_data(config)
    made = columns(tmp_path)
    indices = ["chunk_ends"] if online else []  # of its texts
    assert made.keys() == names(f"{packing}-64", *indices)
    mapped = []
    for module in (token_store, text_store):
        map_array = lambda *arguments: mapped.append(arguments[0]) or flat_file.map_array(*arguments)  # noqa: E731
        monkeypatch.setattr(module, "map_array", map_array)
    with open_data(config, prepare=False, begun=keys) as data:
        assert not mapped and not any(packed._columns._maps for _, packed in (*data.train, *data.held_out))
        found = batches(data)
        assert all(packed._columns._maps for _, packed in (*data.train, *data.held_out))
    assert made.items() == columns(tmp_path).items()
    with open_data(config, prepare=False, begun=keys) as data:
        assert_same(batches(data), found)


def test_each_way_to_pack_has_a_file_of_its_own(config, tmp_path):
    open_data(config)
    for other in ({"sequence": 128}, {"packing": "split"}):
        settings = {"mix": config.mix, "store": config.store, "packing": "best_fit", "sequence": 64} | other
        open_data(DataConfig(**settings))
    assert columns(tmp_path).keys() == names("best_fit-64", "best_fit-128", "split-64")


def test_a_packing_of_other_documents_is_made_anew(config, tmp_path):
    """As where somebody has copied one store's files over another's."""
    data = open_data(config)
    found = batches(data)
    books, notes = (opened.folder for opened in data.prepared.stores.values())
    shutil.copy(notes / "train.best_fit-64.columns", books)
    assert_same(batches(open_data(config)), found)


def test_damage_is_named_when_a_row_is_read_and_in_inspect(config, tmp_path, capsys):
    data = open_data(config)
    path = data.prepared.stores["books"].folder / "train.best_fit-64.columns"
    content = bytearray(path.read_bytes())
    content[column_file.HEADER] ^= 2
    path.write_bytes(content)
    said = (
        r"books-\w+/train\.best_fit-64\.columns: block 0 of its first is damaged; delete it: it is made anew"
    )
    with pytest.raises(InputError, match=said):
        batches(open_data(config))
    assert (
        main(["inspect", config.mix, "--store", config.store, "--packing", "best_fit", "--sequence", "64"])
        == 2
    )
    assert "is damaged; delete it" in capsys.readouterr().err
    path.unlink()
    batches(open_data(config))


def test_where_the_store_cannot_be_written_one_line_says_so(config, tmp_path, monkeypatch, caplog):
    keys = prepare_data(config)
    found = batches(open_data(config))
    for path in tmp_path.rglob("*.columns"):
        path.unlink()

    @contextlib.contextmanager
    def refused(target, sync):
        raise InputError(f"{target}: cannot be written") from OSError(errno.EROFS, "Read-only file system")
        yield

    monkeypatch.setattr(column_file, "written_atomically", refused)
    monkeypatch.setattr(logging.getLogger("jaxthru"), "propagate", True)
    with caplog.at_level(logging.WARNING):
        data = open_data(config, prepare=False, begun=keys)
    [line] = [record.getMessage() for record in caplog.records]
    assert "4 of 4 packings cannot be kept beside their stores" in line
    assert (
        f"`python -m jaxthru.data prepare {config.mix} --store {config.store} --sequence 64 --packing" in line
    )
    assert not columns(tmp_path)
    assert_same(batches(data), found)


def test_prepare_makes_the_packing_it_is_asked_for(config, tmp_path, capsys):
    command = ["prepare", config.mix, "--store", config.store]
    assert main([*command, "--sequence", "1"]) == 2 and not (tmp_path / "store").exists()
    assert main(command) == 0 and not columns(tmp_path)
    assert main([*command, "--sequence", "64", "--packing", "best_fit"]) == 0
    rows = sum(packed.rows for _, packed in open_data(config).train)
    assert f"{config.store}: {rows} rows of 64 tokens (best_fit)\n" in capsys.readouterr().out
    assert columns(tmp_path).keys() == names("best_fit-64")
