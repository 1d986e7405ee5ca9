"""What a trace says of collectives, from traces whose answer is known."""

import dataclasses
import itertools
import json
import math
import shutil
import subprocess
import sys
import time
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.collective_matmul import tiles
from pallas_kernels.collective_matmul.shapes import GPU


def test_exposed_collectives_and_what_they_slow(bench):
    measure = bench("measure.exposed_collectives").measure
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
    found = bench("measure.exposed_collectives").measure([(10, 20)], [(0, 50, "matmul"), (50, 90, "matmul")])
    assert found["exposed_collectives"] == found["idle"] == found["slowed_by"] == 0
    assert found["computing"] == 1


def test_a_trace_says_on_what_its_run_was_made(bench, tmp_path):
    of_run = bench("measure.exposed_collectives").of_run
    trace = tmp_path / "profile" / "20" / "production" / "0" / "vm.xplane.pb"
    assert of_run(trace) == {}
    versions = {"versions": {"jax": "0.11.2"}, "python": "3.12.3", "backend": "cuda 13000"}
    known = versions | {"devices": {"kind": "NVIDIA H200", "count": 2}, "flags": {}}
    (tmp_path / "environment.json").write_text(json.dumps(known))
    assert of_run(trace) == {
        "device": {"kind": "NVIDIA H200", "count": 2},
        "versions": {"jax": "0.11.2", "python": "3.12.3", "backend": "cuda 13000"},
    }


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("name", ["qkv_apart", "down"])
def test_every_call_of_a_timed_program_is_made(name, backward, bench):
    """XLA drops calls whose results nothing reads; their time would still be divided by their number."""
    module, programs = bench("measure.collectives"), bench("measure.programs")
    case = module.Case(
        GPU[name].scaled(64), bench("collective_matmul_check").make_mesh({"tensor": 2}), backward
    )
    runs, _ = module.contenders(case)
    assert {"plain", "ring", "dispatched", "product", "collective"} <= set(runs)
    assert programs.same(runs["dispatched"], runs["plain"]) and not programs.same(runs["ring"], runs["plain"])
    refuse = lambda *operands: (_ for _ in ()).throw(ValueError("too large"))  # noqa: E731
    compiled, failed = programs.compile_in_a_row(
        runs | {"refuses": (refuse, case.operands())}, case.in_a_row
    )  # which counts
    assert set(compiled) == set(runs) and failed == {"refuses": "ValueError('too large')"}

    def dropping(*operands):
        for _ in range(programs.IN_A_ROW):
            results = runs["plain"][0](*operands)
            operands, results = jax.lax.optimization_barrier((operands, results))
        return results

    dropped, single = (
        programs.work(lowered.compile())
        for lowered in (jax.jit(dropping).lower(*case.operands()), programs.program(*runs["plain"], calls=1))
    )
    with pytest.raises(RuntimeError, match=f"plain: {programs.IN_A_ROW} calls compile to"):
        programs.require_every_call(dropped, single, programs.IN_A_ROW, "plain")


@pytest.fixture
def clock(bench, monkeypatch):
    """Returns [seconds], by which programs are timed, and which the test moves."""
    now = [0.0]
    own = types.SimpleNamespace(perf_counter=lambda: now[0], sleep=lambda seconds: None)
    monkeypatch.setattr(bench("measure.programs"), "time", own)
    return now


def test_the_time_of_a_call_is_that_of_its_program_shared(bench, clock):
    programs = bench("measure.programs")
    assert [programs.in_a_row(flops) for flops in (0.2e12, 1e12, 4e12)] == [16, 7, 4]

    def slow():
        clock[0] += 0.04

    for calls in (4, 16):
        times = programs.in_turns({"slow": (slow, ())}, 2, 2, 0.01, calls)["slow"]
        assert times == [pytest.approx(0.04 / calls)] * 2


def test_alike_programs_do_without_the_first(bench, monkeypatch):
    """Whose single call, with which all are compared, does not compile."""
    programs = bench("measure.programs")
    compile_safely, x = programs.checks.compile_safely, jax.numpy.ones((8, 8))
    runs = {name: (lambda x, by=by: (by * (x @ x),), (x,)) for by, name in enumerate("abc", 2)}

    def fails_at_first(lowered):
        if "constant dense<2.0" in lowered.as_text():
            raise ValueError("too large")
        return compile_safely(lowered)

    monkeypatch.setattr(programs.checks, "compile_safely", fails_at_first)
    compiled, failed = programs.compile_in_a_row(runs, programs.IN_A_ROW, alike=True)
    assert set(compiled) == {"b", "c"} and failed == {"a": "ValueError('too large')"}


def test_a_slow_first_run_makes_no_short_turns(bench, clock, monkeypatch):
    """Of one program each, in which the wait for it would be a large part."""
    module, contenders = bench("collective_matmul"), bench("measure.collectives")
    case = contenders.Case(
        GPU["qkv"].scaled(64), bench("collective_matmul_check").make_mesh({"tensor": 2}), False
    )
    plain = case.of(contenders.reference), case.operands()
    runs = {"plain": plain, "product": case.products(), "collective": case.collective()}
    monkeypatch.setattr(module, "contenders", lambda *_: (dict(runs), {}))
    compile_in_a_row, turns, cold = module.programs.compile_in_a_row, [], set(runs)

    def slow_at_first(runs, *how):
        compiled, failed = compile_in_a_row(runs, *how)

        def run(name, program):
            def call(*operands):
                clock[0] += 0.2 if name in cold else 0.05
                cold.discard(name)
                return program(*operands)

            return call

        return {name: run(name, program) for name, program in compiled.items()}, failed

    monkeypatch.setattr(module.programs, "compile_in_a_row", slow_at_first)
    turn = module.programs.turn
    monkeypatch.setattr(module.programs, "turn", lambda *words: turns.append(words[2]) or turn(*words))
    how = types.SimpleNamespace(warmup_turns=2, turns=2, turn_seconds=0.2, rest_seconds=0.0)
    how.cap_rounds, how.adds, how.leave_out = 0, False, ()
    module.measure(case, how)
    a_round = len(runs)
    assert min(turns[2 * a_round : 4 * a_round] + turns[6 * a_round :]) > 1


def test_a_nan_behind_a_good_result_is_seen(bench):
    good = jnp.ones((2, 2), jnp.bfloat16)
    found = bench("measure.programs").apart([good, good.at[1, 1].set(jnp.nan)], [good, good])
    assert max(map(float, found)) == float("inf")


def test_a_script_that_hangs_is_killed_with_all_it_started(bench, tmp_path):
    script, pid = tmp_path / "hangs.py", tmp_path / "pid"
    script.write_text(
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(pid)!r}, 'w').write(str(child.pid))\n"
        "print('started', flush=True)\n"
        "print('complained', file=sys.stderr, flush=True)\n"
        "time.sleep(600)\n"
    )
    with pytest.raises(RuntimeError, match=r"not done in 3 s, so it may hang: (?s:.*)started\ncomplained"):
        bench("collective_matmul_check").run_script([str(script)], 3)
    until(lambda: ended(pid))


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs setpriv")
def test_a_script_ends_with_the_process_that_started_it(bench, tmp_path):
    pid, child = tmp_path / "pid", tmp_path / "child.py"
    child.write_text(f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(600)")
    folder = Path(bench("collective_matmul_check").__file__).parent
    code = f"import collective_matmul_check; collective_matmul_check.run_script([{str(child)!r}], 600)"
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=folder)
    until(lambda: pid.exists() and pid.read_text())
    parent.kill()
    parent.wait()
    until(lambda: ended(pid))


def until(holds, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def ended(pid: Path) -> bool:
    status = Path("/proc", pid.read_text(), "status")
    return not status.exists() or "zombie" in status.read_text()


def test_a_script_that_fails_says_why(bench, tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import os, sys; print(os.environ['GIVEN']); sys.exit('the reason')")
    run_script = bench("collective_matmul_check").run_script
    with pytest.raises(RuntimeError, match=r"ended with status 1(?s:.*)the reason"):
        run_script([str(script)], 30, GIVEN="1")
    script.write_text("import os; print(os.environ['GIVEN'], os.environ['CUDA_MODULE_LOADING'])")
    assert run_script([str(script)], 30, GIVEN="1") == "1 EAGER\n"


def test_results_left_from_before_are_seen(bench):
    """A run that gives what the one before it should have differs from the first on its own operands."""
    module = bench("collective_matmul_check")
    mesh, shape = module.make_mesh({"tensor": 2}), GPU["down"].scaled(64)
    compiled = module.compile_both(mesh, shape, "ring")
    line = module.check(mesh, shape, compiled, seed=3)
    assert max(line["errors"]) <= module.BFLOAT16_TOLERANCE
    assert module.unequal_repeats(mesh, shape, compiled, seed=3, repeats=2) == 0

    class Stale:
        def __init__(self):
            self.results = []
            self.out_info, self.output_shardings = compiled.out_info, compiled.output_shardings
            self.memory_analysis = compiled.memory_analysis

        def __call__(self, *operands):
            self.results.append(compiled(*operands))
            return self.results[-1 if len(self.results) <= 2 else -2]

    assert module.unequal_repeats(mesh, shape, Stale(), seed=3, repeats=2) == 4


def test_a_case_that_hangs_ends_its_process(bench, tmp_path):
    module = bench("collective_matmul_check")
    script = tmp_path / "hangs.py"
    script.write_text(
        f"import sys, time; sys.path.insert(0, {str(Path(module.__file__).parent)!r})\n"
        "import collective_matmul_check as checks\n"
        "with checks.ends_within(30, 'this'): pass\n"
        "with checks.ends_within(0.1, 'that'): time.sleep(600)\n"
    )
    with pytest.raises(RuntimeError, match=r"with status 3(?s:.*)not done in 0.1 s, so it may hang: that"):
        module.run_script([str(script)], 60)


def test_every_tile_can_be_tried_at_its_tiny_shape(bench, monkeypatch):
    """What is given to the child process is what the kernels take there."""
    checks, module = bench("collective_matmul_check"), bench("measure.collectives")
    monkeypatch.setattr(tiles, "TABLE", {})
    mesh, kind = checks.make_mesh({"tensor": 2}), jax.local_devices()[0].device_kind
    given = []
    monkeypatch.setattr(checks, "run_script", lambda arguments, seconds: given.append(arguments))
    for name, backward in itertools.product(("qkv", "qkv_apart", "down"), (False, True)):
        large = module.Case(GPU[name], mesh, backward).problem
        tries = [module.Case(checks.SHAPES[shape], mesh, backward).problem for shape in checks.TRIES_TILES]
        (tiny,) = [problem for problem in tries if problem.operation == large.operation]
        candidates = tiles.candidates(large)
        assert {one.cluster for one in candidates} == {1, 2}
        checks.try_tiles({"tensor": 2}, candidates)
        told = json.loads(given[-1][given[-1].index("--tiles") + 1])
        assert [tiles.Tiles(**one) for one in told] == candidates
        for one in candidates:
            checks.impose(one)
            assert tiles.choose(tiny, kind, tiles.SMS) == (one, None)
            odd = dataclasses.replace(tiny, rows=tiny.rows + 64)
            assert tiles.TABLE[kind].get(odd.key) is None


@pytest.mark.parametrize(
    "name, backward, moved",
    [
        ("qkv", False, {"all-gather": 1}),
        ("qkv", True, {"all-gather": 1, "reduce-scatter": 1}),  # x again, and its gradient
        ("down", False, {"reduce-scatter": 1}),
        ("down", True, {"all-gather": 1}),
    ],
)
def test_the_ceiling_counts_every_transfer(name, backward, moved, bench):
    module, checks = bench("measure.collectives"), bench("collective_matmul_check")
    programs = bench("measure.programs")
    for axes in ({"tensor": 2}, {"data": 2, "tensor": 2}):
        case = module.Case(GPU[name].scaled(64), checks.make_mesh(axes), backward)
        run, operands = case.collective()
        assert programs.work(programs.program(run, operands, calls=1).compile()) == moved
        # Each device sends (t - 1) / t of a matrix [t·M, columns] in each; the kernel, no less.
        whole = case.shape.rows * (case.shape.contracted if name == "qkv" else case.shape.columns[0]) * 2
        assert len(moved) * whole / 2 == case.problem.bytes_sent
        arrays = [x for group in operands for x in group]
        for kind, x in zip(moved, arrays, strict=True):
            assert x.nbytes // case.mesh.size == (whole // 2 if kind == "all-gather" else whole)


def test_a_kernel_of_jax_that_is_wrong_is_left_out(bench, monkeypatch):
    module = bench("measure.collectives")
    mesh = bench("collective_matmul_check").make_mesh({"tensor": 2})
    plain = lambda case: case.of(module.reference)  # noqa: E731
    monkeypatch.setattr(module, "jax_kernels", lambda case, orders: {"jax_right": plain(case)})
    module.first_run_of_jax(mesh)
    wrong = lambda case: lambda *operands: [2 * y for y in plain(case)(*operands)]  # noqa: E731
    monkeypatch.setattr(module, "jax_kernels", lambda case, orders: {"jax_wrong": wrong(case)})
    with pytest.raises(RuntimeError, match="jax_wrong: 1 apart from the plain form"):
        module.first_run_of_jax(mesh)
    found, missing = module.contenders(module.Case(GPU["qkv"].scaled(64), mesh, False), "it hangs")
    assert "jax_wrong" not in found and missing["jax"] == "it hangs"


def test_tuning_tries_then_times_then_checks(bench, monkeypatch):
    """With the plain form in the kernels' place: sizes, the best in another order, finalists, one entry."""
    module, contenders = bench("tune_collective_matmul"), bench("measure.collectives")
    real = module.reference

    def stand_in(name):
        return lambda *operands, axis_name, tiles: getattr(real, name)(*operands, axis_name=axis_name)

    functions = {name: stand_in(name) for name in ("all_gather_matmul", "all_gather_matmul_backward")}
    monkeypatch.setattr(module, "mosaic_gpu", types.SimpleNamespace(**functions))
    sizes = [tiles.Tiles(m, 128) for m in (128, 256)]
    orders = [dataclasses.replace(size, width=4) for size in sizes]
    tried = []
    monkeypatch.setattr(module.checks, "try_tiles", lambda axes, new: tried.append(new))
    mesh = bench("collective_matmul_check").make_mesh({"tensor": 2})
    case = contenders.Case(GPU["qkv"].scaled(64), mesh, backward=False)
    few = [dataclasses.replace(size, senders=9) for size in sizes]
    module.try_all(mesh, [*sizes, *orders, *orders, *few])
    assert tried == [sizes]
    search = [lambda best: sizes, lambda best: [dataclasses.replace(best[0], width=4), best[0]]]
    entry = module.tune(case, search, 2, 0.0, {"rounds": 2, "seconds": 0.0})
    first, second, third = (tiles.Tiles(**{k: one[k] for k in entry["tiles"]}) for one in entry["tried"])
    assert [first, second] == sizes and third in orders, "the best, in another order"
    assert all(min(one["microseconds"]) > 0 and one["joules"] is None for one in entry["tried"])
    (chosen,) = [one for one in entry["tried"] if {k: one[k] for k in entry["tiles"]} == entry["tiles"]]
    least = min(math.prod(one["at_the_cap"]) for one in entry["tried"])
    assert math.prod(entry["microseconds"]) == least and chosen["at_the_cap"] == entry["microseconds"]
    both = zip(entry["microseconds"], entry["plain_microseconds"], strict=True)
    assert entry["faster"] == all(fused < plain for fused, plain in both)


def test_the_search_goes_from_sizes_to_orders_to_senders(bench):
    """Those that read least come first, and what the table has is among them."""
    module, contenders = bench("tune_collective_matmul"), bench("measure.collectives")
    case = contenders.Case(GPU["gate_up"], bench("collective_matmul_check").make_mesh({"tensor": 2}), False)
    sizes, orders, senders = module.stages(case.problem, [9])
    first = sizes([])
    assert tiles.choose(case.problem, "NVIDIA H200", tiles.SMS)[0] in first and len(set(first)) == len(first)
    best = tiles.Tiles(128, 256, cluster=2)
    read = [tiles.wave_bytes(case.problem, one) for one in tiles.reordered(case.problem, best)]
    assert read == sorted(read) and read[0] < 0.8 * read[-1]
    # 16 row blocks of 128 by 8.25 column blocks of 256, of 4,096 contracted, two bytes each.
    assert read[0] == 2.0 * 4096 * (16 * 128 + 8.25 * 256)
    assert len(orders([best, first[0]])) == 2 * (module.ORDERS_EACH - 1)
    assert senders([best]) == [dataclasses.replace(best, senders=9)]


def test_power_is_taken_between_steps_of_the_counters(bench):
    """A reading before the first step is of another time; each GPU has steps of its own."""
    power = bench("gpu_joules").power
    assert power([[(0.1, 100.0), (0.2, 170.0), (0.3, 240.0)], [(0.15, 7.0), (0.25, 57.0)]]) == 600.0
    assert power([[(0.1, 100.0)]]) is None and power([]) is None
    assert power([[(0.1, 1.0), (0.2, 2.0)], []]) is None, "one that is not known is not left out"


def test_joules_of_a_call_are_those_of_all_gpus(bench):
    found = {
        "plain": {"seconds": [1e-3, 1e-3], "watts": [700.0, 700.0]},
        "jax_128x256_N_M8": {"seconds": [0.8e-3, 0.8e-3], "watts": [700.0, None]},
    }
    rows = bench("collective_matmul").told_of_energy(found, 2)
    assert rows["plain"]["joules"] == 1.4 and rows["jax"]["joules"] == 1.12
    assert rows["jax"]["over_plain"] == 1.25 and rows["jax"]["joules_over_plain"] == 0.8


def test_tiles_of_jax_are_searched_by_size_and_then_by_order(bench, monkeypatch):
    """The fastest without a pause and the fastest in bursts are kept, once each."""
    module = bench("measure.collectives")
    case = module.Case(GPU["qkv"], bench("collective_matmul_check").make_mesh({"tensor": 2}), False)
    monkeypatch.setattr(module.Case, "operands", lambda case: ())
    monkeypatch.setattr(
        module, "jax_kernels", lambda case, orders=tiles.ORDERS: module.all_jax_kernels(case, orders)
    )
    asked = []

    def times(runs, calls):
        asked.append(sorted(runs))
        return {
            name: [1.0 if "256x128_N_N8" in name else 2.0 + ("256x128_N" not in name), 5.0 - ("_M8" in name)]
            for name in runs
        }

    monkeypatch.setattr(module.programs, "brief_times", times)
    kept, timed = module.search_jax(case)
    assert len(asked[0]) == len(module.JAX_SIZES) and len(timed) == sum(map(len, asked))
    assert "jax_256x128_N_N8" in kept and len(kept) == 2
