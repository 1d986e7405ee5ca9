"""The command on a GPU: exact repeats where asked for, and no quiet fallback."""

import pytest
from runs import compiled, kill, make_workplace, resumed_from

pytestmark = pytest.mark.gpu

FORMS = {
    "float32, portable attention": {"kernels__attention": "xla"},
    "bfloat16, Triton attention": {"precision__compute": "bfloat16"},
    "bfloat16, cuDNN attention": {"precision__compute": "bfloat16", "kernels__attention": "cudnn_packed"},
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return make_workplace(tmp_path_factory.mktemp("runs"), "cuda")


@pytest.mark.parametrize("form", FORMS)
def test_deterministic_runs_repeat_and_resume_bit_for_bit(place, form):
    settings = FORMS[form] | {"train__deterministic": "true", "train__steps": 200}
    name = form.replace(", ", "_").split(" ")[0]
    place.run(f"{name}_whole", **settings)
    place.run(f"{name}_again", **settings)
    process = place.start(f"{name}_killed", **settings)
    place.wait_for_step(process, f"{name}_killed", 60)
    kill(process)
    assert resumed_from(place.run(f"{name}_killed", **settings)) >= 50
    whole = place.losses(f"{name}_whole")
    assert whole[200][0] < whole[1][0] - 0.5
    assert place.losses(f"{name}_again") == whole
    assert place.losses(f"{name}_killed") == whole


def test_scanned_and_unrolled_layers_train_alike(place):
    settings = FORMS["bfloat16, cuDNN attention"]
    runs = []
    for loop in ("scan", "unroll"):
        place.run(loop, model__loop=loop, **settings)
        runs.append(place.losses(loop))
    assert all(runs[0][step][0] == pytest.approx(runs[1][step][0], abs=0.02) for step in runs[0])


def test_the_kernel_that_ran_is_named_and_float32_is_no_quiet_fallback(place):
    assert "kernels: attention uses cudnn_packed" in place.run("named", precision__compute="bfloat16")
    output = place.run("refused", code=2)
    assert "float32" in output and "kernels.attention" in output


def test_the_second_start_compiles_nothing(place):
    settings = {"precision__compute": "bfloat16", "model__mlp": 640}
    assert compiled(place.run("cold", "--verbose", **settings)) > 0
    assert compiled(place.run("warm", "--verbose", **settings)) == 0
