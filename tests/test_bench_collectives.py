"""What a trace says of collectives, from traces whose answer is known."""

import pytest

from pallas_kernels.collective_matmul.shapes import GPU


def test_exposed_collectives_and_what_they_slow(bench):
    measure = bench("exposed_collectives").measure
    kernels = [
        (0, 100, "matmul"),
        (100, 200, "matmul"),
        (200, 330, "matmul"),  # wholly beside a collective: 30 slower than the one alone
        (400, 410, "norm"),  # beside one too, and with none alone to compare with
    ]
    collectives = [(190, 340), (340, 350), (395, 420)]
    found = measure(collectives, kernels)
    assert found == {
        "seconds": pytest.approx(420e-9, abs=1e-6),
        "computing": round(340 / 420, 4),
        "collectives": round(185 / 420, 4),
        "exposed_collectives": round((20 + 15) / 420, 4),
        "idle": round(45 / 420, 4),
        "beside_collectives": round(140 / 420, 4),
        "of_which_compared": round(130 / 420, 4),
        # The second matmul has a little of a collective beside it, and counts as neither.
        "slowed_by": round(30 / 420, 4),
    }


def test_a_step_that_hides_everything_exposes_nothing(bench):
    found = bench("exposed_collectives").measure([(10, 20)], [(0, 50, "matmul"), (50, 90, "matmul")])
    assert found["exposed_collectives"] == found["idle"] == found["slowed_by"] == 0
    assert found["computing"] == 1


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("name", ["qkv_apart", "down"])
def test_every_call_of_a_timed_program_is_made(name, backward, bench):
    """XLA drops calls whose results nothing reads; their time would still be divided by their number."""
    import jax

    module = bench("collective_matmul")
    case = module.Case(
        GPU[name].scaled(64), bench("collective_matmul_check").make_mesh({"tensor": 2}), backward
    )
    runs, _ = module.contenders(case)
    assert {"plain", "ring", "default", "product", "collective"} <= set(runs)
    module.compile_in_a_row(runs)  # which counts

    def dropping(*operands):
        for _ in range(module.IN_A_ROW):
            results = runs["plain"][0](*operands)
            operands, results = jax.lax.optimization_barrier((operands, results))
        return results

    dropped, single = (
        module.work(lowered.compile())
        for lowered in (jax.jit(dropping).lower(*case.operands()), module.program(*runs["plain"], calls=1))
    )
    with pytest.raises(RuntimeError, match="plain: 4 calls compile to"):
        module.require_every_call(dropped, single, "plain")
