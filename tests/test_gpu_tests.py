"""The table of what is tested on GPUs alone, out of reports by pytest: scripts/gpu_tests.py."""

import importlib.metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

ONE, TWO = "tests/kernels/test_attention.py", "tests/test_train_gpu.py"
WHY = "needs two NVIDIA GPUs"


def report(commit: str, *ended: tuple[str, str], device: str = "NVIDIA H200") -> tuple[str, dict]:
    """Returns what pytest writes of cases of files, and what there is to note."""
    inner = {
        "passed": "",
        "failed": '<failure message="AssertionError">no</failure>',
        "broken": '<error message="in setup">no</error>',
        "skipped": f'<skipped type="pytest.skip" message="{WHY}">tests/x.py:1: {WHY}</skipped>',
    }
    cases = []
    for file, how in ended:
        module = file.removesuffix(".py").replace("/", ".")
        name = f'classname="{module}" name="test_x[a-b.c]"'
        if how == "unloadable":
            name, how = f'classname="" name="{module}"', "broken"
        cases.append(f'<testcase {name} time="1.5">{inner[how]}</testcase>')
    text = (
        '<?xml version="1.0" encoding="utf-8"?><testsuites name="pytest tests"><testsuite name="pytest" '
        f'timestamp="2026-11-0{commit[0]}T10:00:00.5+00:00">{"".join(cases)}</testsuite></testsuites>'
    )
    return text, {"commit": commit, "device": device, "jax": "0.11.2"}


@pytest.fixture
def after(script, tmp_path):
    """Returns a function that takes up reports one after another and returns the rows there then are."""
    made = script("gpu_tests")

    def take_up(*reports: tuple[str, dict]) -> list[str]:
        text = f"# Before\n\n{made.BEGIN}\n{made.END}\n\nafter\n"
        for number, (written, told) in enumerate(reports):
            path = tmp_path / f"{number}.xml"
            path.write_text(written)
            made.note(path, told)
            text = made.rewritten(text, made.read([path]), [ONE, TWO])
        assert text.startswith(f"# Before\n\n{made.BEGIN}\n{made.HEAD[0]}\n")
        assert text.endswith(f" |\n{made.END}\n\nafter\n")
        return text.split(made.BEGIN)[1].split(made.END)[0].strip().splitlines()[2:]

    return take_up


ALL = (ONE, "passed"), (ONE, "passed"), (TWO, "passed")
SKIPPED = (ONE, "passed"), (ONE, "skipped"), (TWO, "passed")


def test_what_never_ran_is_listed_too(after):
    assert after(report("1a", (ONE, "passed"), (ONE, "skipped"), (ONE, "skipped"))) == [
        f"| {ONE} | 1 passed | 2026-11-01, 1a | NVIDIA H200, JAX 0.11.2 |",
        f"| {ONE} | 2 skipped: {WHY} | never |  |",
        f"| {TWO} | not run | never |  |",
    ]


def test_what_is_skipped_keeps_when_it_passed(after):
    both = report("1a", *ALL, device="2 × NVIDIA H200")
    expected = [
        f"| {ONE} | 1 passed | 2026-11-03, 3c | NVIDIA H200, JAX 0.11.2 |",
        f"| {ONE} | 1 skipped: {WHY} | 2026-11-01, 1a | 2 × NVIDIA H200, JAX 0.11.2 |",
        f"| {TWO} | 1 passed | 2026-11-03, 3c | NVIDIA H200, JAX 0.11.2 |",
    ]
    assert after(both, report("3c", *SKIPPED)) == expected
    assert after(both, report("2b", *SKIPPED), report("3c", *SKIPPED)) == expected
    assert after(report("1a", *SKIPPED), report("3c", *ALL))[0].startswith(f"| {ONE} | 2 passed | 2026-11-03")


def test_a_file_may_have_run_in_parts(script, tmp_path):
    made, paths = script("gpu_tests"), [tmp_path / "a.xml", tmp_path / "b.xml"]
    for path, how in zip(paths, ("passed", "failed"), strict=True):
        text, told = report("1a", (ONE, "passed"), (ONE, how), (ONE, "skipped"))
        path.write_text(text)
        made.note(path, told)
    cases = [(row.file, row.cases) for row in made.read(paths)]
    assert cases == [(ONE, "1 of 4 failed at 1a"), (ONE, f"2 skipped: {WHY}")]


@pytest.mark.parametrize(("at_once", "share"), [(1, None), (4, "0.150")])
def test_a_run_notes_its_code_and_devices(at_once, share, script, monkeypatch, tmp_path):
    parts = [f"{ONE}::test_a[b, c]", f"{ONE}::test_d"]
    made, ran = script("gpu_tests"), []
    monkeypatch.delenv("XLA_CLIENT_MEM_FRACTION", raising=False)

    def run(command, env=None, **_):
        if command[0] == "nvidia-smi":
            return SimpleNamespace(stdout="NVIDIA H200\nNVIDIA H200\n")
        (path,) = (Path(word.split("=")[1]) for word in command if word.startswith("--junitxml="))
        ran.append(command[-1])
        assert env.get("XLA_CLIENT_MEM_FRACTION") == share
        path.write_text(report("1a", (ONE, "passed"))[0])
        return SimpleNamespace(returncode=-9 * (command[-1] == parts[0]), stdout="")

    monkeypatch.setattr(made.subprocess, "run", run)
    assert made.run(tmp_path / "reports", "3c", parts, at_once) == 1
    assert (ran if at_once == 1 else sorted(ran)) == parts
    (row,) = made.read(sorted((tmp_path / "reports").glob("*.xml")))
    jax = importlib.metadata.version("jax")
    assert row == (ONE, "2 passed", "2026-11-01, 3c", f"2 × NVIDIA H200, JAX {jax}")


def test_what_fails_says_so_and_when_it_last_passed(after):
    failing = report("2b", (ONE, "passed"), (ONE, "failed"), (ONE, "broken"))
    assert after(report("1a", *ALL), failing) == [
        f"| {ONE} | 2 of 3 failed at 2b | 2026-11-01, 1a | NVIDIA H200, JAX 0.11.2 |",
        f"| {TWO} | 1 passed | 2026-11-01, 1a | NVIDIA H200, JAX 0.11.2 |",  # no newer report
    ]
    assert after(report("2b", (TWO, "unloadable")))[1] == f"| {TWO} | 1 of 1 failed at 2b | never |  |"
    assert after(failing)[0] == f"| {ONE} | 2 of 3 failed at 2b | never |  |"
    assert after(report("1a", *ALL), failing, failing)[0].endswith(
        "| 2026-11-01, 1a | NVIDIA H200, JAX 0.11.2 |"
    )


def test_every_file_with_a_case_for_a_gpu_is_in_the_table(script):
    made = script("gpu_tests")
    kept = made.KEPT.read_text().split(made.BEGIN)[1].split(made.END)[0]
    files = made.files(made.ROOT)
    assert "tests/test_train_gpu.py" in files and "tests/kernels/test_attention.py" in files
    assert "tests/test_gpu_tests.py" not in files and "tests/test_bench_data_gpu.py" not in files
    assert sorted({row.file for row in made.parse(kept)}) == files, "scripts/gpu_tests.py write"


def test_what_is_about_several_gpus_is_a_part_of_what_needs_one(script):
    made = script("gpu_tests")
    several = made.files(made.ROOT, made.SEVERAL)
    assert "tests/runtime/test_copies.py" in several and set(several) < set(made.files(made.ROOT))
