"""What a notebook has: public names, batches, the name of a run, and what stands for an object."""

import dataclasses
import inspect
import pydoc
import sys
import types
import xml.etree.ElementTree

import jax
import numpy as np
import pytest
from runs import ROOT, make_workplace

import jaxthru
from jaxthru import config as configuration
from jaxthru import train
from jaxthru.build.batches import row_cost
from jaxthru.data.loading.batch import BATCH_FIELDS
from jaxthru.runtime.errors import InputError
from jaxthru.training import display
from jaxthru.training.run_directory import EVAL_FIELDS, METRICS_FIELDS, RunDirectory


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return make_workplace(tmp_path_factory.mktemp("notebook"))


def configured(place, *settings):
    data = f"data.mix={place.folder}/mix.toml", f"data.store={place.folder}/store", "data.sequence=64"
    shape = "train.rows=8", "train.steps=3", "mesh.fsdp=8"
    return jaxthru.load_config(ROOT / "configs" / "quickstart.py", [*data, *shape, *settings])


def test_the_public_names_are_listed_with_a_line_each():
    names = [name for name in dir(jaxthru) if not name.startswith("__")]
    assert names == sorted(jaxthru.__all__) and {"batches", "run", "load_config"} < {*names}
    page = pydoc.plain(pydoc.render_doc(jaxthru))
    for name in names:
        assert getattr(jaxthru, name).__doc__
        assert any(line.split()[:1] == [name] for line in jaxthru.__doc__.splitlines()), name
        assert name in page


def test_batches_are_those_that_a_run_trains_on(place):
    config = configured(place)
    with jaxthru.batches(config) as batches:
        said, data = repr(batches), batches.data
        found = [jax.device_get(batch) for batch in batches]
        assert next(batches, None) is None  # and it is closed
    train = config.train
    assert len(found) == train.steps
    for name, dtype in BATCH_FIELDS.items():
        assert found[0][name].shape == (8, 64) and found[0][name].dtype == dtype, name
        assert name in inspect.getdoc(jaxthru.batches)
    with data.train_batches(
        ((0, data.mixture),), seed=train.seed, rows=8, steps=3, cost=row_cost(config)
    ) as expected:
        for ours, theirs in zip(found, expected, strict=True):
            for name in BATCH_FIELDS:
                np.testing.assert_array_equal(ours[name], theirs[name])
    assert said.startswith("<batches of 3 steps, 8 rows of 64 tokens each; <data of mix ")
    for part in ("python_stdlib ", "prose ", "rows of 64 (", "vocabulary 300"):
        assert part in repr(data)


def test_batches_lie_on_the_devices_and_close(place):
    batches = jaxthru.batches(configured(place))
    batch = next(batches)
    assert len(batch["tokens"].sharding.device_set) == 8
    batches.close()
    with pytest.raises(StopIteration):
        next(batches)


def test_batches_of_what_cannot_be_split_are_refused(place):
    with pytest.raises(InputError, match=r"train\.rows / train\.microbatches = 4: must be a multiple"):
        jaxthru.batches(configured(place, "train.rows=4"))


def test_a_configuration_is_named_after_its_file(monkeypatch):
    config = jaxthru.load_config(ROOT / "configs" / "quickstart.py")
    assert config.name == "quickstart" and "name" not in configuration.to_dict(config)
    assert config == dataclasses.replace(config) and dataclasses.replace(config).name == "run"
    assert jaxthru.RunConfig().name == "run"
    made = []

    def fresh(name):
        made.append(name)
        raise InputError("enough")

    monkeypatch.setattr(RunDirectory, "fresh", fresh)
    monkeypatch.setattr(train, "prepared", lambda config, begun, kept: {})
    opened = types.SimpleNamespace(account=())
    monkeypatch.setattr(train, "open_shared", lambda config, keys, kept: opened)
    monkeypatch.setattr(train, "opening", lambda data: ())
    for given, name in ((config, None), (config, "own"), (dataclasses.replace(config), None)):
        with pytest.raises(InputError, match="enough"):
            jaxthru.run(given, name=name)
    assert made == ["quickstart", "own", "run"]


def write_run(path, steps: int = 3, of: int = 3) -> RunDirectory:
    run = RunDirectory(path)
    run.path.mkdir()
    config = configuration.load(ROOT / "configs" / "quickstart.py", [f"train.steps={of}"])
    configuration.dump(config, run.config)
    for step in range(1, steps + 1):
        row = {
            "step": step,
            "loss": 4.0 / step,
            "loss_by_source": {"prose": 1.0},
            "learning_rate": 1e-3 * step,
        }
        run.append_metrics(dict.fromkeys(METRICS_FIELDS) | row)
    run.append_eval(dict.fromkeys(EVAL_FIELDS) | {"step": steps, "loss": 2.5})
    return run


def test_a_run_is_a_table_and_a_picture(tmp_path):
    run = write_run(tmp_path / "run")
    metrics = run.metrics()
    assert metrics["loss"].tolist() == [4.0, 2.0, 4.0 / 3] and metrics["loss_by_source.prose"].sum() == 3
    assert run.evaluations()["loss"].tolist() == [2.5]
    picture = run.plot()
    assert repr(picture) == (
        "<plots of loss (nats per token), by step; learning rate, by step: a notebook shows them, save(FILE) "
        "writes them as SVG>"
    )
    root = xml.etree.ElementTree.fromstring(picture._repr_svg_())
    assert len(root.findall(".//{*}polyline")) == 3
    both = run.plot(beside={"other": write_run(tmp_path / "other")})
    assert [*both.panels[0].series] == ["training", "held out", "other, training", "other, held out"]
    assert [*both.panels[1].series] == ["", "other"]
    picture.save(tmp_path / "plots" / "run.svg")
    assert (tmp_path / "plots" / "run.svg").read_text() == picture._repr_svg_()


def test_a_run_says_how_far_it_is(tmp_path):
    run = write_run(tmp_path / "run", of=40)
    assert repr(run) == f"RunDirectory('{run.path}'): 3 of 40 steps, loss 1.3333"
    with run.metrics_file.open("a") as file:
        file.write('{"step": 4, "lo')
    assert repr(run).endswith("3 of 40 steps, loss 1.3333")
    run.config.unlink()
    assert repr(run).endswith("'): 3 steps, loss 1.3333") and run.steps() is None
    empty = RunDirectory(tmp_path / "none")
    assert repr(empty) == f"RunDirectory('{empty.path}'): no steps yet"
    with pytest.raises(InputError, match="no step has been recorded yet"):
        empty.plot()


@pytest.mark.parametrize(("steps", "purpose", "more"), [(3, "train longer", 6), (2, "resume", None)])
def test_what_comes_next_is_said_in_the_language_of_the_place(tmp_path, monkeypatch, steps, purpose, more):
    run = write_run(tmp_path / "run", steps)
    assert not [what for what, _ in display.commands(run) if what in ("resume", "train longer")]
    (run.checkpoints / str(steps)).mkdir(parents=True)
    shell = dict(display.commands(run))
    assert shell[purpose].endswith(f"--run-dir {run.path}" + (f" --set train.steps={more}" if more else ""))
    ipython = types.SimpleNamespace(get_ipython=lambda: object())
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    cell = dict(display.commands(run))
    assert cell["look"] == f"jaxthru.RunDirectory('{run.path}').plot()"
    settings = f", ['train.steps={more}']" if more else ""
    assert cell[purpose] == f"jaxthru.run(jaxthru.load_config('{run.config}'{settings}), '{run.path}')"
    assert eval(cell["look"])._repr_svg_().startswith("<svg")
    ipython.get_ipython = lambda: None  # imported, and nothing runs in it
    assert dict(display.commands(run)) == shell
