"""The command with its state in host memory: killed, resumed, resumed elsewhere, and refused."""

import signal

import pytest
from runs import kill, make_workplace, resumed_from

from jaxthru.train import main

LAYERED = {"model__loop": "unroll", "remat__policy": "attention", "train__steps": 16}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return make_workplace(tmp_path_factory.mktemp("runs"), forks=True)


@pytest.mark.slow(minutes=0.4)
def test_killed_and_run_again_the_losses_are_the_same(place):
    """At level optimizer, with split weights and masters, to the bit."""
    settings = LAYERED | {
        "offload__level": "optimizer",
        "optim__state": "split_master_int8",
        "checkpoint__every": 3,
        "train__microbatches": 2,
    }
    place.run("whole", **settings)
    process = place.start("killed", **settings)
    place.wait_for_step(process, "killed", 5)
    kill(process)
    assert resumed_from(place.run("killed", **settings)) >= 3
    whole = place.losses("whole")
    assert place.losses("killed") == whole
    assert whole[16][0] < whole[1][0] - 0.3


@pytest.mark.slow(minutes=0.4)
def test_resumed_at_other_levels_the_losses_are_the_same(place):
    """What lies on disk does not say where it lived."""
    place.run("resident", checkpoint__every=0, **LAYERED)
    levels = ({}, {"offload__level": "parameters"}, {"offload__level": "optimizer", "offload__fraction": 0.5})
    for number, level in enumerate(levels):
        process = place.start("moved", checkpoint__every=0, **LAYERED, **level)
        if number == len(levels) - 1:
            output = process.communicate(timeout=240)[0]
            assert process.returncode == 0, output
        else:
            # What the run before it did is in the record already, and is booked again.
            place.wait_for_step(process, "moved", 4 + 5 * number)
            process.send_signal(signal.SIGTERM)
            output = process.communicate(timeout=120)[0]
            assert process.returncode == 143 and "stopped after step" in output, output
        assert (resumed_from(output) > 0) == (number > 0)
        if number:
            assert "changed since the run was started: offload.level" in output
    moved, resident = place.losses("moved"), place.losses("resident")
    assert moved.keys() == resident.keys()
    for step, (loss, _) in resident.items():
        assert moved[step][0] == pytest.approx(loss, rel=1e-6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"offload__level": "optimizer", "model__loop": "scan"},
            "model.loop = 'scan': with offload.level = 'optimizer'",
        ),
        (
            {"offload__activations": "inputs", "remat__policy": "none"},
            "remat.policy = 'none': with offload.level = 'none', activations = 'inputs'",
        ),
        (
            {"offload__level": "parameters", "remat__policy": "none"},
            "remat.policy = 'none': with offload.level = 'parameters'",
        ),
        ({"offload__fraction": 0}, "offload.fraction = 0.0: must be above 0, at most 1"),
        (
            {"offload__level": "optimiser"},
            "offload.level = 'optimiser': must be one of 'auto', 'none', 'optimizer'",
        ),
        ({"offload__prefetch": 3}, "offload.prefetch = 3: must be at least 0, at most 2"),
        ({"offload__staging_gib": "inf"}, "offload.staging_gib = inf: must be finite"),
        ({"offload__host_gib": -1}, "offload.host_gib = -1.0: must be above 0"),
    ],
    ids=lambda value: "" if isinstance(value, str) else ",".join(value),
)
def test_bad_input_is_one_line(place, capsys, settings, message):
    given = LAYERED | {"precision__compute": "float32", "train__rows": 8} | settings
    code = main(place.command("refused", **given)[3:])
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("jaxthru: ")]
    assert code == 2 and len(errors) == 1 and message in errors[0]
    assert not (place.folder / "refused").exists()
