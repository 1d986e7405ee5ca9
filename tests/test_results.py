"""docs/results.md: the records that it links to are there, and say where they come from."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "scripts" / "bench" / "results"
PAGE = (ROOT / "docs" / "results.md").read_text()
ORIGIN = {"device", "versions", "commit", "command"}
OLD = {
    "data_balance.json": {"device"},  # costs are computed there, not measured
    "overlap_h200x2.json": {"device", "versions"},  # its row `exposed`, of a trace
    "profiler_tensor_h200x2.json": {"device", "versions", "command"},  # in its runs, by other names
    "starts_h200.json": {"device", "versions", "commit"},  # in its `environment`, by other names
}
"""What older records lack. None is to be added."""


def runs(value: object, known: frozenset[str] = frozenset(), line: bool = False) -> Iterator[frozenset[str]]:
    """Yields, of each run in a record, what it says of its origin, itself or in what it is a part of.

    line: it is what a block printed. Other runs say which benchmark they are; what consists of runs is none.
    """
    if isinstance(value, list):
        for each in value:
            yield from runs(each, known)
    elif isinstance(value, dict):
        known |= {key for key in ORIGIN if value.get(key)}
        within = [run for key, part in value.items() for run in runs(part, known, key == "line")]
        yield from within or ([known] if line or "benchmark" in value else [])


def test_every_record_has_its_link_and_every_link_its_record():
    linked = set(re.findall(r"\(\.\./scripts/bench/results/([^)]+\.json)\)", PAGE))
    assert linked == {path.name for path in RESULTS.glob("*.json")}


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_a_record_says_on_what_of_which_commit_and_how_it_was_made(path):
    found = list(runs(json.loads(path.read_text())))
    assert found, "no run in it"
    assert frozenset().union(*(ORIGIN - run for run in found)) == OLD.get(path.name, set())


def test_every_command_that_the_pages_name_is_there(bench):
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    text = "\n".join(path.read_text() for path in pages)
    scripts = set(re.findall(r"python scripts/bench/([a-z_0-9/]+\.py)|`(measure/[a-z_0-9]+\.py)", text))
    scripts = {name for pair in scripts for name in pair if name}
    assert len(scripts) > 10
    assert not {name for name in scripts if not (ROOT / "scripts" / "bench" / name).is_file()}
    suites = re.findall(r"suite\.py ([a-z_]+)(?: --rows ([a-z0-9_,]+))?", text)
    assert len({name for name, _ in suites}) > 7
    for name, rows in suites:
        known = bench(f"suites.{name}").ROWS
        assert set(filter(None, rows.split(","))) <= set(known), name


def test_origins_are_looked_for_in_each_run():
    step = {"device": {"kind": "cpu"}, "versions": {"jax": "0"}}
    record = {"benchmark": "b", "commit": "c", "command": "d", "blocks": [{"line": step}, {"line": step}]}
    assert [*runs(record)] == [ORIGIN, ORIGIN]
    record["blocks"].append({"line": {"tokens_per_second": 2.0}})
    assert [*runs(record)][2] == {"commit", "command"}
    assert [*runs({"benchmark": "b"})] == [set()]


@pytest.mark.parametrize(
    "name", ("offload_8b_64k_h200", "offload_h200", "offload_more_h200", "offload_peers_h200")
)
def test_bars_that_the_page_calls_met_are_met_by_the_suite_that_judges(bench, tmp_path, name):
    record = json.loads((RESULTS / f"{name}.json").read_text())
    setup, judged = bench("suites.rows").Setup("", tmp_path), []
    for row in bench("suites.offload").ROWS.values():
        if any(block["contender"] == row.own and "line" in block for block in record["blocks"]):
            found = row.found(setup, record["blocks"])
            judged += [bar.met(found) for bar in row.bars]
    assert True in judged and False not in judged


def test_as_many_bars_of_kernels_are_met_as_the_page_says(bench):
    suite = bench("suites.overlap")
    record = json.loads((RESULTS / "overlap_h200x2.json").read_text())
    found = suite.measured({row: of["said"] for row, of in record.items() if "said" in of}, 2)
    bars = {bar.what: bar for row in suite.ROWS.values() for bar in row.bars if "over plain, " in bar.what}
    met = [sum(bar.met(found) is True for what, bar in bars.items() if what.endswith(how))
           for how in bench("suites.overlap_bars").REGIMES.values()]  # fmt: skip
    assert met == [5, 3] and "finds five met in bursts and three without a pause" in PAGE
