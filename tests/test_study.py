"""The study of docs/scale.md, made small; and the page has what its record says."""

import json
import re
import xml.etree.ElementTree
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def study(study_script):
    return study_script("scale")


@pytest.fixture(scope="module")
def small(study, tmp_path_factory):
    out = tmp_path_factory.mktemp("study")
    study.main(["--small", "--price", "2", "--out", str(out)])
    return out, json.loads((out / "scale.json").read_text())


def test_a_slower_network_ends_scaling_sooner(small):
    _, found = small
    ends = {(row["batch"], row["fabric"]): row["ends"]["overlapped"] for row in found["scaling"]}
    for batch in ("as shipped", "16.8 M tokens"):
        assert ends[batch, "10 GbE"] < ends[batch, "RoCE"] <= ends[batch, "InfiniBand"]


def test_queue_pairs_spread_what_the_hash_bunches(small):
    _, found = small
    for placement in ("packed", "random"):
        rows = [row for row in found["hash"] if row["placement"] == placement]
        seconds = [row["seconds"] for row in rows]
        assert [row["qps"] for row in rows] == [1, 4, 16, 32]
        assert seconds == sorted(seconds, reverse=True)
        assert all(row["seconds"] >= 0.999 * row["perfect"] for row in rows)
    assert seconds[1] / seconds[2] == pytest.approx(1.4, abs=0.2)  # Meta's, hosts anywhere


def test_the_published_rows_are_met_or_named(small):
    _, found = small
    infiniband, ethernet = found["table_iii"]
    assert ethernet["step"] == pytest.approx(39.8, rel=0.1)
    assert infiniband["step"] is None and infiniband["binds"].startswith("not bound by links")


def test_a_bill_is_of_the_record_s_watts_and_the_price_that_was_given(small):
    _, found = small
    bill = found["bill"]
    for row in bill["rows"]:
        hours = bill["tokens"] * bill["flops_per_token"] / bill["flops_per_second"] / row["share"] / 3600
        assert row["device_hours"] == pytest.approx(hours)
        assert row["mwh"] == pytest.approx(hours * bill["watts"] / 1e6)
        assert row["dollars"] == pytest.approx(2 * hours)


def test_pictures_are_drawn(small):
    out, _ = small
    assert {path.name for path in out.glob("*.svg")} == {"scale_llama3_8b.svg", "scale_hash.svg"}
    for path in out.glob("*.svg"):
        assert xml.etree.ElementTree.parse(path).getroot().tag.endswith("svg")


def test_the_page_has_what_the_record_says(study):
    found = json.loads((ROOT / "scripts" / "study" / "results" / "scale.json").read_text())
    page = (ROOT / "docs" / "scale.md").read_text()
    for name, table in study.tables(found).items():
        assert f"<!-- {name}: by scripts/study/scale.py -->\n{table}\n<!-- end of {name} -->" in page
    for picture in re.findall(r"\(images/(scale_[a-z0-9_]+\.svg)\)", page):
        assert (ROOT / "docs" / "images" / picture).is_file()
