"""What `auto` was settled to is kept for the next start: as on a GPU, on a CPU whose choices are kept too."""

import dataclasses
import importlib
from pathlib import Path

import jax
import pytest
import tiny

import jaxthru
from jaxthru import config as configuration
from jaxthru.build import choices, compiled, confirmed, kept_choices, proposals
from jaxthru.build.checks import validate
from jaxthru.build.choices import Choice, Documents
from jaxthru.build.compiled import compile_step, fit_here
from jaxthru.build.memory_estimate import Room
from jaxthru.runtime.errors import InputError

GIB = 2**30
WIDE = Room(GIB, GIB)
DOCUMENTS = Documents(4, 1, mean=16.0)


@pytest.fixture
def starts(monkeypatch, tmp_path):
    """Returns (room) -> how often a start searched, and its build; and what returns the files that are kept.
    Each start begins as a process does: with no search in memory."""
    asked = jaxthru.RunConfig(
        train=dataclasses.replace(jaxthru.RunConfig().train, rows=2),
        model=dataclasses.replace(tiny.SHAPE, loop="auto"),
        data=dataclasses.replace(jaxthru.RunConfig().data, sequence=tiny.SEQUENCE),
        precision=dataclasses.replace(jaxthru.RunConfig().precision, compute="float32"),
    )
    by_speed, searches = proposals._by_speed, []
    monkeypatch.setattr(kept_choices, "SEARCHED_ON", "cpu")
    monkeypatch.setattr(kept_choices, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(compiled, "fits_as_one_program", lambda *_, **how: False)
    monkeypatch.setattr(proposals, "_by_speed", lambda *of: searches.append(of) or by_speed(*of))

    def start(room=WIDE):
        monkeypatch.setattr(choices, "room_here", lambda config: room)
        monkeypatch.setattr(choices, "documents", lambda config: DOCUMENTS)
        monkeypatch.setattr(choices, "documents_of", lambda data: DOCUMENTS)
        proposals._candidates.cache_clear()
        searches.clear()
        layout = fit_here(asked, jax.devices()[:1])
        return len(searches), compile_step(asked, layout, tiny.Data())

    return start, lambda: [*(tmp_path / "choices").glob("*")]


def test_the_next_start_takes_what_this_one_has_found(starts):
    start, files = starts
    searched, first = start()
    (file,) = files()
    kept = {each.key for each in choices.read(file)}
    assert searched == 1 and "remat.policy" in kept and not any(key.startswith("kernels.") for key in kept)
    searched, second = start()
    assert searched == 0 and not choices.open_keys(second.config)
    assert (second.config, second.choices) == (first.config, first.choices)
    assert files() == [file]


@pytest.fixture
def kept(monkeypatch, tmp_path):
    """Returns (settings, documents) -> the choices that are kept for them."""
    monkeypatch.setattr(kept_choices, "SEARCHED_ON", "cpu")
    monkeypatch.setattr(kept_choices, "cache_folder", lambda: tmp_path)

    def of(*settings, documents=DOCUMENTS):
        config = configuration.changed(jaxthru.RunConfig(), [*settings])
        return kept_choices.KeptChoices(config, validate(config, jax.devices()[:1]), lambda: documents)

    return of


ROWS = (Choice("remat.policy", "auto", "gate", "why", "1 × cpu"),)


def test_what_choices_depend_on_is_part_of_their_name(kept, monkeypatch):
    kept().keep(ROWS)
    assert kept().found == ROWS
    assert not kept("train.rows=4").found
    assert not kept(documents=DOCUMENTS._replace(mean=17.0)).found
    with monkeypatch.context() as other:
        other.setenv("XLA_CLIENT_MEM_FRACTION", "0.5")
        assert not kept().found
    with monkeypatch.context() as other:
        other.setattr(kept_choices, "_code", lambda family: "another")
        assert not kept().found
    assert kept().found == ROWS


def test_assumed_documents_keep_nothing(kept, tmp_path):
    kept(documents=DOCUMENTS._replace(notes=("the corpus is not prepared",))).keep(ROWS)
    assert not [*tmp_path.iterdir()]


def test_another_family_is_another_model(kept, monkeypatch, tmp_path):
    (tmp_path / "a_family.py").write_text(
        "import dataclasses\nfrom jaxthru.models import llama\nfrom jaxthru.models.llama import *\n"
        "@dataclasses.dataclass(frozen=True)\nclass Config(llama.Config): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    theirs = importlib.import_module("a_family")
    config = dataclasses.replace(jaxthru.RunConfig(), model=theirs.Config())
    assert repr(config) == repr(jaxthru.RunConfig())
    layout = validate(config, jax.devices()[:1])
    kept().keep(ROWS)
    assert not kept_choices.KeptChoices(config, layout, lambda: DOCUMENTS).found


def test_what_is_named_and_what_changes_numbers_is_left_alone(kept):
    values = {"optim.state": "int8", "remat.policy": "gate", "offload.level": "optimizer"}
    values |= {
        "offload.fraction": 0.25,
        "offload.prefetch": 0,
        "kernels.attention": "triton",
        "kernels.rms_norm": "triton",
    }
    why = {"kernels.rms_norm": choices.CAN_RUN}
    asked = {"offload.fraction": 1.0, "offload.prefetch": 2}
    kept().keep(
        Choice(key, asked.get(key, "auto"), value, why.get(key, "why"), "") for key, value in values.items()
    )
    found, config = kept(), jaxthru.RunConfig()
    settled = found.settled(config)
    offload = settled.offload
    assert (offload.level, offload.fraction, offload.prefetch) == ("optimizer", 0.25, 0)
    assert (settled.remat.policy, settled.kernels.attention) == ("gate", "triton")
    assert (settled.optim.state, settled.kernels.rms_norm) == ("auto", "auto")
    assert (found.reason("kernels.attention"), found.reason("kernels.rms_norm")) == ("why", "")
    named = configuration.changed(config, ["remat.policy=full", "kernels.attention=xla"])
    settled = found.settled(named)
    assert (settled.remat.policy, settled.kernels.attention) == ("full", "xla")


def test_all_processes_ask_the_first(kept, monkeypatch):
    """One may see a store that another does not see yet."""
    asked = []
    monkeypatch.setattr(
        kept_choices.distributed, "from_first", lambda call: asked.append(call()) or asked[-1]
    )
    kept(documents=DOCUMENTS._replace(notes=("the corpus is not prepared",)))
    kept()
    assert asked == [[], []]


def test_what_fits_no_more_is_forgotten(starts, monkeypatch):
    start, files = starts
    start()
    with monkeypatch.context() as read_only:
        read_only.setattr(Path, "unlink", lambda *_, **how: (_ for _ in ()).throw(PermissionError()))
        with pytest.raises(InputError, match="nothing fits"):
            start(room=Room(1000, 1000))
    assert files()
    with pytest.raises(InputError, match="nothing fits"):
        start(room=Room(1000, 1000))
    assert not files()


def test_what_is_refused_by_now_is_searched_for_anew(starts, monkeypatch):
    start, files = starts
    _, first = start()
    compiled_before, refused = confirmed.compile_candidate, []

    def refuses(asked, candidate, *rest):
        if not refused:
            refused.append(candidate.config.remat.policy)
            raise InputError("kernels.attention = 'triton': needs jax-triton")
        return compiled_before(asked, candidate, *rest)

    monkeypatch.setattr(confirmed, "compile_candidate", refuses)
    _, second = start()
    assert refused == [first.config.remat.policy] and second.choices == first.choices and len(files()) == 1


def test_a_damaged_file_is_as_good_as_none(kept, tmp_path):
    kept().keep(ROWS)
    (file,) = (tmp_path / "choices").iterdir()
    whole = file.read_bytes()
    file.write_bytes(whole[:40])
    again = kept()
    assert not again.found
    again.keep(ROWS)
    assert file.read_bytes() == whole and kept().found == ROWS


def test_on_a_cpu_nothing_is_kept(monkeypatch, tmp_path):
    monkeypatch.setattr(kept_choices, "cache_folder", lambda: tmp_path)
    config = jaxthru.RunConfig()
    layout = validate(config, jax.devices()[:1])
    kept = kept_choices.KeptChoices(config, layout, lambda: pytest.fail("asked"))
    kept.keep([Choice("remat.policy", "auto", "none", "why", "1 × cpu")])
    kept.drop()
    assert not kept.found and not [*tmp_path.iterdir()]
