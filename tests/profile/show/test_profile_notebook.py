"""What a notebook shows of a ledger: a picture, tables, advice; and of two compared."""

import dataclasses
import json
import xml.etree.ElementTree

import pytest
import sample

import jaxthru
from jaxthru.profile.account.ledger import Kernel
from jaxthru.runtime.errors import InputError
from jaxthru.training.run_directory import RunDirectory


def run(path, found):
    """Writes what a profiled run leaves behind, without the trace."""
    folder = path / "profile" / "20"
    folder.mkdir(parents=True)
    found.write(folder / "ledger.json")
    (path / "config.json").write_text(json.dumps({"train": {"steps": 40}}))
    return RunDirectory(path)


def kernel(name, seconds, flops=None):
    return Kernel(name, name, "matmul", f"jit(step)/{name}", "a.py:1", 2.0, seconds, None, None, flops)


def test_a_ledger_is_a_picture_a_table_and_sentences(tmp_path):
    kernels = tuple(kernel(f"k{i}", 1e-3 * i, 2e12 if i % 2 else None) for i in range(14))
    found = dataclasses.replace(sample.ledger(), kernels=kernels)
    shown = jaxthru.ledger(run(tmp_path / "run", found))
    picture = xml.etree.ElementTree.fromstring(shown._repr_svg_())
    texts = [each.text for each in picture.findall(".//{*}text")]
    assert "Observed step" in texts and "Attention" in texts
    table = shown.table()
    assert table["operation"].tolist() == [f"k{i}" for i in range(13, 3, -1)]
    assert table["ms"][0] == pytest.approx(13) and table["GFLOP/s"][0] == 2000
    assert len(shown.table(None)) == 14 and "Matmuls" in repr(table)
    assert len(shown.layers()) == len(found.scopes)
    assert "Attention" in repr(shown) and max(map(len, repr(shown).splitlines())) <= 100
    for each in found.advice:
        assert f"{each.key} = {each.value}: " in shown.advice()


def test_two_runs_are_compared_by_their_names(tmp_path):
    before = run(tmp_path / "a", sample.ledger())
    after = run(tmp_path / "b", sample.ledger())
    shown = jaxthru.compare(before, str(after.path), names=("small", "large"))
    assert repr(shown).startswith("No change above the noise of both runs") and "large" in repr(shown)
    assert shown.comparison.top is None and len(shown.details) >= len(repr(shown))


def test_a_run_without_a_profile_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"was not profiled; train with --set profile\.at=20"):
        jaxthru.ledger(tmp_path)
