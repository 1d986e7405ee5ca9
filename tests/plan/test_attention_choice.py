"""Attention by a measured table: what is asked of it, when it is not, and that a run and its plan follow."""

import dataclasses
import json
import re
import types

import jax
import numpy as np
import pytest
import tiny
from runs import ROOT

import jaxthru
from jaxthru import config as configuration
from jaxthru.build import attention_choice, choices
from jaxthru.build.checks import validate
from jaxthru.build.compiled import compile_step
from jaxthru.build.memory_estimate import Room, estimate, layout_of
from jaxthru.build.refusal import NothingFits
from jaxthru.build.stand_ins import attention_stand_in
from jaxthru.data.loading.dataset import open_data
from jaxthru.data.mixture.configuration import Mixture
from jaxthru.data.mixture.packing import pack
from jaxthru.plan import memory
from jaxthru.plan.__main__ import main
from jaxthru.runtime import aot
from pallas_kernels import dispatch
from pallas_kernels.attention import measured, triton
from pallas_kernels.dispatch import Unsupported
from pallas_kernels.testing import has_gpu

HOPPER = (9, 0)
MEAN = 512.0


def table(*points: tuple) -> dict:
    times = {"cudnn_packed": 3.16, "triton": 1.74, "reference": 1.0}
    return {"9.0": [dataclasses.asdict(measured.Point(*each[:3], times, each[3], 32)) for each in points]}


def load(*overrides: str):
    """Llama 3 8B's widths, head_dim 128, in 2 rows of 8,192."""
    named = "remat.policy=projections", "model.loop=unroll"
    given = (*named, "model.layers=4", "optim.state=split_master", *overrides)
    return configuration.load(ROOT / "configs" / "llama3_8b_8layer.py", list(given))


def by_table(config, segments=16, mean=MEAN, capability=HOPPER):
    config, said = attention_choice.by_table(config, layout_of(config, 1), segments, mean, capability)
    return config.kernels.attention, said


@pytest.mark.parametrize("fastest", ["triton", "cudnn_packed"])
def test_the_fastest_that_was_measured_is_taken_and_says_why(monkeypatch, fastest):
    monkeypatch.setattr(measured, "TABLE", table((128, 8192, 500, fastest)))
    chosen, said = by_table(load())
    assert chosen == fastest
    assert said.startswith("by the table: head_dim 128, rows of 8,192, documents of about 512 tokens (")


@pytest.mark.parametrize(
    ("overrides", "asked"),
    [
        ((), {"capability": None}),
        ((), {"capability": (10, 0)}),
        ((), {"mean": None}),
        ((), {"mean": 100.0}),
        ((), {"segments": 1}),
        (("kernels.attention=xla",), {}),
        (("train.deterministic=true",), {}),
        (("precision.compute=float32",), {}),
        (("model.head_dim=64",), {}),
        (("model.window=1024",), {}),
        (("data.sequence=2048",), {}),
    ],
    ids=str,
)
def test_what_was_not_measured_is_left_to_the_rule(monkeypatch, overrides, asked):
    monkeypatch.setattr(measured, "TABLE", table((128, 8192, 500, "triton")))
    config = load(*overrides)
    assert by_table(config, **asked) == (config.kernels.attention, "")


def test_where_neither_was_faster_the_rule_decides(monkeypatch):
    monkeypatch.setattr(measured, "TABLE", table((128, 8192, 500, None)))
    assert by_table(load()) == ("auto", "")


def test_cudnn_gets_no_more_workspace_than_the_rule_gives_it(monkeypatch):
    """Two rows of 8,192 tokens with 32 heads of 128: 512 MiB a segment, of 20 GiB."""
    monkeypatch.setattr(measured, "TABLE", table((128, 8192, 500, "cudnn_packed")))
    assert by_table(load("train.rows=2"), segments=40)[0] == "cudnn_packed"
    assert by_table(load("train.rows=2"), segments=48) == ("auto", "")
    assert by_table(load("train.rows=4"), segments=40) == ("auto", "")
    assert by_table(load("train.rows=4", "train.microbatches=2"), segments=40)[0] == "cudnn_packed"


@pytest.mark.slow
def test_where_its_workspace_has_no_room_the_slower_attention_makes_the_faster_step():
    """All 32 layers of Llama 3 8B on one H200, in rows of 8,192 tokens: with cuDNN's attention more of the
    state was on the host, and a step took 1.78 s for 1.52 with Triton's."""
    asked = configuration.load(ROOT / "configs" / "llama3_8b_one_gpu.py", ["kernels.attention=auto"])

    def chosen(gib: float | None, mean: float = 4000.0, *overrides: str) -> tuple[str, str]:
        config = configuration.changed(asked, list(overrides))
        room = gib and Room(round(gib * 2**30), 115 << 30)
        config, said = attention_choice.by_table(config, layout_of(config, 1), 32, mean, HOPPER, room)
        return config.kernels.attention, said

    name, said = chosen(134.2)
    assert name == "triton" and said.startswith(
        "as cudnn_packed, the faster one by the table: head_dim 128, "
    )
    assert re.search(r", needs a workspace: a step with remat \w+, .* would take [1-9]\d?% longer$", said)
    assert chosen(190.0) == chosen(None) and chosen(None)[0] == "cudnn_packed", "room for all of it, or asked"
    assert chosen(134.2, 4000.0, "model.layers=8")[0] == "cudnn_packed"
    assert chosen(134.2, 500.0)[1].startswith("by the table: "), "Triton's is the faster one there"
    resident = "remat.policy=full", "offload.level=none"
    assert chosen(110.0, 4000.0, *resident)[1].endswith("needs a workspace: there is no room for it")
    assert chosen(60.0, 4000.0, *resident)[0] == "cudnn_packed", "Triton's would not fit either"


@pytest.mark.parametrize(
    ("fastest", "moved", "taken", "said"),
    [
        (1.02, 0, "triton", "would take 2% longer"),
        (1.005, 0, "cudnn_packed", ""),
        (1.0, 1, "triton", "would take as long"),  # with more on the host, which has to be pinned
        (0.995, 1, "triton", "would take as long"),
        (0.98, 1, "cudnn_packed", ""),
    ],
)
def test_of_attentions_as_fast_the_one_with_less_on_the_host_is_taken(
    monkeypatch, fastest, moved, taken, said
):
    step = {"near": False, "said": "its settings"}
    first = types.SimpleNamespace(seconds=fastest, moved=moved, **step)
    second = types.SimpleNamespace(seconds=0.9, moved=0, **step)
    found = {"cudnn_packed": first, "triton": second}
    monkeypatch.setattr(attention_choice, "candidates", lambda config, *_, **how: iter([found[config]]))
    monkeypatch.setattr(attention_choice, "least_seconds", lambda *_: 0.5)
    why = attention_choice._no_room("cudnn_packed", "triton", 0.1, None, layout_of(load(), 1), 32)
    assert bool(why) == (taken == "triton") and why.endswith(said)


def test_what_refuses_on_this_gpu_is_not_taken(monkeypatch):
    monkeypatch.setattr(measured, "TABLE", table((128, 8192, 500, "triton")))
    for module in (dispatch, triton):
        monkeypatch.setattr(module, "nvidia_compute_capability", lambda: HOPPER)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")

    def refuse(package):
        raise Unsupported("needs jax-triton")

    monkeypatch.setattr(triton, "load_triton", refuse)
    assert by_table(load()) == ("auto", "")

    def triton_call(*operands, out_shape, **how):
        return jax.tree.map(lambda x: jax.numpy.zeros(x.shape, x.dtype), out_shape)

    loaded = types.SimpleNamespace(triton_call=triton_call), types.SimpleNamespace(forward=None)
    monkeypatch.setattr(triton, "load_triton", lambda package: loaded)
    assert by_table(load())[0] == "triton"


# What a corpus says of its documents


def packing(lengths: list[int], sequence: int):
    return pack(np.cumsum(lengths), sequence, "split")


def corpus(count: str, weights: tuple[float, float], *lengths: list[int]):
    names = ("long", "short", "empty")
    mixture = dataclasses.replace(Mixture.plain(dict(zip(names, (*weights, 0.0), strict=True))), count=count)
    packed = [packing(each, 64) for each in (*lengths, [])]
    tokens = {name: int(of.length.sum()) for name, of in zip(names, packed, strict=True)}
    pieces = {name: len(of.length) for name, of in zip(names, packed, strict=True)}
    of_plain_text = {"units": {}, "masked": False}
    counted = {"tokens": tokens, "pieces": pieces}
    return types.SimpleNamespace(names=names, mixture=mixture, **counted, **of_plain_text)


def test_the_mean_is_of_pieces_as_the_mix_weighs_its_sources():
    long, short = [64] * 100, [8] * 10
    mean = attention_choice.mean_document
    assert mean(corpus("tokens", (1.0, 0.0), long, short)) == 64
    assert mean(corpus("tokens", (0.0, 1.0), long, short)) == 8
    # Of 128 tokens half are in 1 piece and half in 8: 9 pieces. Of 2 documents, 72 tokens are in 2 pieces.
    assert mean(corpus("tokens", (0.5, 0.5), long, short)) == pytest.approx(128 / 9)
    assert mean(corpus("documents", (0.5, 0.5), long, short)) == pytest.approx(36)
    # A document longer than a row is cut: 160 tokens are pieces of 64, 64 and 32.
    assert mean(corpus("tokens", (1.0, 0.0), [160], short)) == pytest.approx(160 / 3)
    assert mean(corpus("tokens", (1.0, 0.0), [], [])) is None


MIX = """
[tokenizer]
vocabulary = 300
[sources.long]
recipe = "local_text"
paths = ["long/*.txt"]
weight = 0.25
[sources.short]
recipe = "local_text"
paths = ["short/*.txt"]
weight = 0.75
"""


@pytest.mark.parametrize("packing", ["split", "best_fit"])
def test_the_mean_is_that_of_the_batches(tmp_path, packing):
    for name, words in (("long", 300), ("short", 10)):
        (tmp_path / name).mkdir()
        for number in range(60):
            text = " ".join(f"{number}{word}" for word in range(words + number % 7))
            (tmp_path / name / f"{number}.txt").write_text(text)
    (tmp_path / "mix.toml").write_text(MIX)
    settings = [f"data.mix={tmp_path}/mix.toml", f"data.store={tmp_path}/store", "data.sequence=256"]
    config = configuration.load(
        ROOT / "configs" / "quickstart.py", [*settings, f"data.packing={packing}", "train.rows=8"]
    )
    assert choices.documents(config).mean is None, "the corpus is not prepared"
    with open_data(config.data) as data:
        with data.train_batches(((0, data.mixture),), seed=0, rows=8, steps=60) as made:
            rows = np.concatenate([np.asarray(batch["segment_ids"]) for batch in made])
        found = attention_choice.mean_document(data)
    assert found == pytest.approx((rows > 0).sum() / rows.max(axis=1).sum(), rel=0.05)
    assert choices.documents(config).mean == found


# A run and its plan

FAR = "reference"  # named by a made-up table, for it runs on a CPU, where nothing would choose it


def tiny_run():
    """Returns the configuration of a tiny model of heads of 16, and its data, documents of 16 tokens."""
    config = jaxthru.RunConfig(
        train=dataclasses.replace(jaxthru.RunConfig().train, rows=2),
        model=dataclasses.replace(tiny.SHAPE, loop="scan"),
        data=dataclasses.replace(jaxthru.RunConfig().data, sequence=tiny.SEQUENCE),
    )
    config = configuration.changed(
        config, ["precision.compute=bfloat16", "remat.policy=none", "offload.level=none"]
    )
    names = ("long", "short", "empty")
    data = corpus("tokens", (1.0, 0.0), [16] * 8, [8])
    data.vocabulary, data.segments, data.tokenizer, data.names = tiny.SHAPE.vocabulary, 8, None, names
    return config, data


@pytest.fixture
def small(monkeypatch):
    """A tiny run, and a table of such rows for this CPU."""
    monkeypatch.setattr(measured, "TABLE", table((16, tiny.SEQUENCE, 16, FAR)))
    monkeypatch.setattr(attention_choice, "capability_of", lambda layout: HOPPER)
    monkeypatch.setattr(choices.hardware, "devices", lambda: jax.devices()[:1])
    return tiny_run()


@pytest.mark.gpu
@pytest.mark.skipif(not has_gpu(HOPPER), reason="needs a Hopper GPU")
@pytest.mark.parametrize("fastest", ["triton", "cudnn_packed"])
def test_a_step_on_a_gpu_takes_it(monkeypatch, fastest):
    found = table((16, tiny.SEQUENCE, 16, fastest))["9.0"]
    here = ".".join(map(str, dispatch.nvidia_compute_capability()))
    monkeypatch.setattr(measured, "TABLE", {here: found})
    config, data = tiny_run()
    build = compile_step(config, validate(config, jax.devices()[:1]), data)
    assert build.step.objective.model.ops.attention_by == build.config.kernels.attention == fastest


def test_a_step_takes_it_and_choices_say_why(small, caplog, tmp_path):
    config, data = small
    caplog.set_level("INFO", "jaxthru")
    build = compile_step(config, validate(config, jax.devices()[:1]), data)
    why = f"by the table: head_dim 16, rows of {tiny.SEQUENCE}, documents of about 16 tokens"
    assert (
        build.config.kernels.attention == FAR
        and f"kernels.attention = 'auto' is '{FAR}', {why}" in caplog.text
    )
    # What a step is evaluated by is the same objective's model.
    assert build.step.objective.model.ops.attention_by == FAR
    choices.write(tmp_path / "choices.json", build.choices)
    (row,) = [
        row
        for row in json.loads((tmp_path / "choices.json").read_text())
        if row["key"] == "kernels.attention"
    ]
    assert (row["asked"], row["chosen"]) == ("auto", FAR) and row["reason"].startswith(why)

    # A run that goes on keeps it, whatever the table says by then.
    resumed = choices.resolve(config, build.config, build.choices)
    assert resumed.kernels.attention == FAR
    caplog.clear()
    again = compile_step(resumed, validate(config, jax.devices()[:1]), data, asked=config)
    (choice,) = [each for each in again.choices if each.key == "kernels.attention"]
    assert (choice.chosen, choice.reason) == (FAR, choices.RECORDED) and "by the table" not in caplog.text


def refused(kept: str, tried: list[str]):
    """Returns a search for which nothing fits but with one attention. tried: what it was asked for."""

    def search(config, *_):
        tried.append(config.kernels.attention)
        if config.kernels.attention != kept:
            raise NothingFits(config, Room(1 << 30, 1 << 30))
        return config

    return search


def test_where_nothing_fits_with_cudnn_triton_is_tried():
    tried, config = [], load("offload.level=none", "remat.policy=auto")
    how = layout_of(config, 1), 16, HOPPER
    found = attention_choice.or_without_workspace(refused("triton", tried), config, *how)
    assert found.kernels.attention == "triton" and tried == ["auto", "triton"]


@pytest.mark.parametrize(
    ("settings", "segments", "capability"),
    [
        (["kernels.attention=cudnn_packed"], 16, HOPPER),  # named
        (["kernels.attention=triton"], 16, HOPPER),
        (["train.deterministic=true"], 16, HOPPER),  # which takes Triton's
        ([], 4096, HOPPER),  # for so many documents cuDNN's workspace is too large anyway
        ([], 16, None),  # another device
    ],
)
def test_where_triton_would_be_no_other_nothing_fits(settings, segments, capability):
    tried, config = [], load("offload.level=none", "remat.policy=auto", *settings)
    layout = layout_of(config, 1)
    with pytest.raises(NothingFits, match="nothing fits"):
        attention_choice.or_without_workspace(refused("xla", tried), config, layout, segments, capability)
    assert len(tried) == 1


def test_a_step_that_does_not_fit_as_compiled_is_compiled_with_triton(small, monkeypatch, caplog):
    config, data = small
    caplog.set_level("INFO", "jaxthru")
    proposed, tried = choices.proposed, []

    def none_but_small(config, *how):
        refused("xla", tried)(config)
        return proposed(config, *how)

    monkeypatch.setattr(attention_choice, "NO_WORKSPACE", "xla")  # which a CPU can run
    monkeypatch.setattr(attention_choice, "attention_stand_in", lambda *_: ("a stand-in", 1 << 30))
    monkeypatch.setattr(choices, "proposed", none_but_small)
    build = compile_step(config, validate(config, jax.devices()[:1]), data)
    assert tried == [FAR, "xla"] and build.step.objective.model.ops.attention_by == "xla"
    (choice,) = [each for each in build.choices if each.key == "kernels.attention"]
    assert (choice.asked, choice.chosen, choice.reason) == ("auto", "xla", attention_choice.NO_ROOM)
    assert f"kernels.attention = 'auto' is 'xla', {attention_choice.NO_ROOM}" in caplog.text


def test_plan_memory_tries_triton_too(monkeypatch, capsys):
    monkeypatch.setattr(aot, "available", lambda: False)
    monkeypatch.setattr(choices, "documents", lambda config: choices.Documents(32, 1, ("a note",), None))
    monkeypatch.setattr(memory, "room", lambda *_: Room(118 << 30, 115 << 30))
    settings = "kernels.attention=auto", "remat.policy=full", "offload.level=none"
    words = [word for setting in settings for word in ("--set", setting)]
    asked = ["memory", "--config", str(ROOT / "configs" / "llama3_8b_one_gpu.py"), *words]
    assert main(asked) == 0
    said = capsys.readouterr().out
    assert f"kernels.attention = auto is triton, {attention_choice.NO_ROOM}" in said and "fits: " in said
    assert main([*asked, "--best"]) == 0
    assert attention_choice.NO_ROOM in capsys.readouterr().out
    named = [word.replace("attention=auto", "attention=cudnn_packed") for word in asked]
    assert main(named) == 1
    said = capsys.readouterr().out
    assert "nothing fits with optim.state" in said and "triton" not in said


def test_what_is_named_wins(small):
    config, data = small
    named = configuration.changed(config, ["kernels.attention=xla"])
    build = compile_step(named, validate(named, jax.devices()[:1]), data)
    assert build.step.objective.model.ops.attention_by == "xla"
    assert not [each for each in build.choices if each.key == "kernels.attention"]


def test_a_step_is_proposed_with_what_it_will_take(small, monkeypatch):
    """Before data is prepared, from what is there already: with another attention another policy may fit."""
    from jaxthru.build import compiled

    config, _ = small
    config = configuration.changed(config, ["remat.policy=auto"])
    seen = []
    monkeypatch.setattr(choices, "documents", lambda config: choices.Documents(8, 1, (), 16.0))
    monkeypatch.setattr(choices, "room_here", lambda config: Room(1 << 40, 1 << 40))
    monkeypatch.setattr(choices, "proposed", lambda config, *how: seen.append(config) or iter([config]))
    monkeypatch.setattr(compiled, "fits_as_one_program", lambda *_, **how: False)
    compiled.fit_here(config, jax.devices()[:1])
    assert seen[0].kernels.attention == FAR


def test_the_estimate_has_the_memory_of_what_is_taken(monkeypatch):
    config, segments = load("remat.policy=projections", "model.loop=unroll", "offload.level=none"), 16
    layout = layout_of(config, 1)
    name, workspace = attention_stand_in(config, layout, segments)
    assert (name, workspace) == ("cudnn_packed_stand_in", 16 << 29)
    whole = estimate(config, segments=segments)[0].peak_device
    monkeypatch.setattr(measured, "TABLE", table((128, 8192, 500, "triton")))
    config, _ = attention_choice.by_table(config, layout, segments, MEAN, HOPPER)
    assert attention_stand_in(config, layout, segments) == ("triton_stand_in", 0)
    assert estimate(config, segments=segments)[0].peak_device < whole - (workspace >> 1)


@pytest.mark.parametrize("mean", [MEAN, None], ids=["known", "unknown"])
def test_plan_memory_follows_the_table(monkeypatch, capsys, mean):
    monkeypatch.setattr(aot, "available", lambda: False)
    monkeypatch.setattr(choices, "documents", lambda config: choices.Documents(16, 1, ("a note",), mean))
    monkeypatch.setattr(measured, "TABLE", table((128, 8192, 500, "triton")))
    settings = "model.layers=1", "remat.policy=full", "model.loop=unroll", "offload.level=none"
    words = [word for each in settings for word in ("--set", each)]
    assert main(["memory", "--config", str(ROOT / "configs" / "llama3_8b_8layer.py"), *words]) == 0
    said = capsys.readouterr().out
    line = "kernels.attention = auto is triton, by the table: head_dim 128, rows of 8,192"
    assert (line in said) == (mean is not None) and "a note" in said
