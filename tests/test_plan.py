"""python -m jaxthru.plan data, and the forecast that it prints."""

import dataclasses
import io
import json
import random
import xml.etree.ElementTree

import numpy as np
import pytest
import rich.console
from runs import ROOT

from jaxthru.build.batches import row_cost
from jaxthru.config import load
from jaxthru.data.loading.dataset import open_data
from jaxthru.plan.__main__ import main
from jaxthru.plan.data import Source, forecast

MIX = """
[tokenizer]
vocabulary = 300
[sources.long]
recipe = "local_text"
paths = ["long/*.txt"]
weight = [[0, 1], [50, 3]]
[sources.short]
recipe = "local_text"
paths = ["short/*.txt"]
weight = 1
max_epochs = 2
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder, draw = tmp_path_factory.mktemp("plan"), random.Random(0)
    for name, longest in (("long", 400), ("short", 20)):
        (folder / name).mkdir()
        for number in range(80):
            words = draw.choices(["row", "step", "seed", "mix"], k=draw.randint(2, longest))
            (folder / name / f"{number}.txt").write_text(" ".join([str(number), *words]))
    (folder / "mix.toml").write_text(MIX)
    return folder


def overrides(place, *more):
    return [
        *(f"data.mix={place}/mix.toml", f"data.store={place}/store", "data.packing=best_fit"),
        *("data.sequence=256", "train.rows=16", "train.microbatches=2", "data.groups=8", "train.steps=60"),
        *more,
    ]


def configured(place, *more):
    return load(ROOT / "configs" / "quickstart.py", overrides(place, *more))


def test_the_forecast_is_what_the_batches_hold(place):
    config = configured(place)
    data = open_data(config.data)
    found = forecast(config, data)
    with data.train_batches(
        ((0, data.mixture),), seed=config.train.seed, rows=16, steps=60, cost=row_cost(config)
    ) as made:
        batches = list(made)
    tokens = np.zeros(2)
    for batch in batches:
        tokens += np.bincount(batch["source"][batch["segment_ids"] > 0], minlength=2)
    assert found.tokens[-1] == pytest.approx(tokens, rel=0.05)
    assert found.padding == pytest.approx(1 - tokens.sum() / (60 * 16 * 256))
    assert [source.available for source in found.sources] == list(data.tokens.values())
    given = tokens / tokens.sum()
    assert [source.share for source in found.sources] == pytest.approx(given, abs=0.01)
    # By the weights 1 to 3 against 1; the second has all it has given in two epochs, and gives no more.
    step = np.arange(60)
    weight = np.interp(step, [0, 50], [1, 3])
    assert found.sources[0].asked == pytest.approx((weight / (weight + 1)).mean(), abs=0.005)
    assert found.sources[0].asked + found.sources[1].asked == pytest.approx(1)
    assert found.sources[1].share < found.sources[1].asked and found.sources[1].epochs <= 2.05
    for source, (_, packed) in zip(found.sources, data.train, strict=True):
        last = packed.packing().last
        assert source.cuts == (~last).sum() and source.documents == last.sum()
        assert source.padding == pytest.approx(1 - packed.packing().length.sum() / (packed.rows * 256))
    linear, attention = row_cost(config)
    worst = []
    for batch in batches:
        span = np.where(batch["segment_ids"] > 0, 2.0 * batch["positions"] + 1, 0).sum(1)
        groups = (linear * 256 + attention * span).reshape(8, 2).sum(1)
        worst.append(groups.max() / groups.mean())
    assert found.groups["balanced"] == pytest.approx(worst)
    assert found.groups["balanced"].mean() < found.groups["unbalanced"].mean()
    assert found.tokens[-1, 1] <= 2.05 * data.tokens["short"]


def test_measured_coefficients_and_no_balance(place):
    assert row_cost(configured(place, "data.linear_cost=2.0", "data.attention_cost=0.5")) == (2.0, 0.5)
    assert row_cost(configured(place, "data.balance=false")) is None
    linear, attention = row_cost(configured(place))
    assert linear > attention > 0


def command(place, *more):
    keys = [word for key in overrides(place, *more) for word in ("--set", key)]
    return ["data", "--config", str(ROOT / "configs" / "quickstart.py"), *keys]


def test_the_command_prints_a_table_and_writes_a_plot(place, capsys, tmp_path):
    plot = tmp_path / "plots" / "plan.svg"
    assert main([*command(place), "--samples", "5", "--plot", str(plot)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    balance = (
        "Load imbalance (costliest of 8 groups / mean), 5 steps: 1.",
        " unbalanced (worst 1.",
        " balanced ",
    )
    for part in ("long", "epochs", "is padding", *balance):
        assert part in printed
    root = xml.etree.ElementTree.fromstring(plot.read_text())
    assert len(root.findall(".//{*}polyline")) == 4


def test_a_run_that_a_source_ends(place):
    text = MIX.replace("max_epochs = 2", 'exhausted = "stop"')
    (place / "ending.toml").write_text(text)
    config = configured(place, f"data.mix={place}/ending.toml", "train.steps=100000")
    found = forecast(config, open_data(config.data), 3)
    assert found.steps < 1000 and found.ended_by == "short"
    assert f"The run ends after step {found.steps}" in found.lines()[-1]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--set", "data.seed=3"], "unknown key data.seed"),
        (["--set", "data.mix=nowhere.toml"], "--set data.mix: is given twice"),
        (["--set", "data.grups=3"], "did you mean 'data.groups'"),
        (["--samples", "0"], "--samples 0"),
        (["--plot", "/proc/none/plan.svg"], "/proc/none/plan.svg: cannot be written"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(place, capsys, more, message):
    assert main([*command(place), *more]) == 2
    (line,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("jaxthru: "))
    assert message in line


def test_a_picture_is_drawn_where_it_is_told_and_nowhere_else(place, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main([*command(place), "--samples", "2"]) == 0
    assert "--plot FILE draws" in capsys.readouterr().out and not [*tmp_path.iterdir()]
    assert main([*command(place), "--samples", "2", "--run-dir", "run", "--plot", "own.svg"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[-2:] == ["plot: own.svg", "plot: run/plan_data.svg"]
    assert (tmp_path / "run" / "plan_data.svg").read_text() == (tmp_path / "own.svg").read_text()


def test_one_line_where_micro_batches_do_not_matter(place):
    found = forecast(configured(place, "train.microbatches=1"), open_data(configured(place).data), 2)
    assert sum("Load imbalance" in line for line in found.lines()) == 1
    found = forecast(configured(place), open_data(configured(place).data), 2)
    assert sum("Load imbalance" in line for line in found.lines()) == 2


def test_rows_that_are_groups_have_nothing_to_balance(place):
    config = configured(place, "data.groups=16", "train.microbatches=1")
    found = forecast(config, open_data(config.data), 20)
    assert (found.groups["balanced"] == found.groups["unbalanced"]).all()
    [groups, devices] = [line for line in found.lines() if line.startswith("Load imbalance")]
    assert "balanced or not: each of data.groups = 16 is one row, which no order makes cheaper" in groups
    assert devices.startswith("Load imbalance over 8 devices, 20 steps: ")
    assert found.devices["balanced"].mean() < found.devices["unbalanced"].mean()


def test_all_of_it_as_json(place, capsys):
    assert main([*command(place), "--samples", "5", "--json"]) == 0
    tree = json.loads(capsys.readouterr().out)
    assert [source["name"] for source in tree["sources"]] == ["long", "short"]
    assert sum(source["share"] for source in tree["sources"]) == pytest.approx(1)
    found = forecast(configured(place), open_data(configured(place).data), 5)
    assert tree["sources"] == [dataclasses.asdict(source) for source in found.sources]
    assert tree["steps"] == 60 and tree["padding"] == found.padding and tree["ended_by"] is None
    balanced = tree["imbalance"]["groups"]["balanced"]
    assert balanced == {"mean": found.groups["balanced"].mean(), "worst": found.groups["balanced"].max()}


def test_of_thousands_of_sources_those_that_matter_are_shown(place):
    """The largest, those of the most epochs and padding, those that fall short; and the others as one."""
    some = forecast(configured(place), open_data(configured(place).data), 2)
    plain = Source("", 0.0003, 0.0003, 0.0003, 0.0003, 1e6, 0.5, 2_000_000, 500, 2000, 0.0, 1500)
    sources = [dataclasses.replace(plain, name=f"s{number}") for number in range(3000)]
    sources[2000] = dataclasses.replace(plain, name="worn", epochs=500.0, tokens=10.0, available=1)
    sources[1] = dataclasses.replace(plain, name="empty", padding=0.9)
    sources[2999] = dataclasses.replace(plain, name="short", asked=0.01)
    sources[7] = dataclasses.replace(plain, name="large", tokens=1e9)
    found = dataclasses.replace(some, sources=tuple(sources))
    console = rich.console.Console(file=io.StringIO(), width=200)
    console.print(found.table())
    lines = console.file.getvalue().splitlines()
    assert len(lines) < 40
    for name in ("worn", "empty", "short", "large"):
        assert sum(name in line.split() for line in lines) == 1
    shown = len(lines) - 3  # but for the head and the others
    [others] = [line for line in lines if "others" in line]
    assert int(others.split()[0].replace(",", "")) == 3000 - shown
    [line] = [line for line in found.lines() if "read more than 4 times" in line]
    assert line.startswith("1 source is read more than 4 times in this run (worn 500): ")
