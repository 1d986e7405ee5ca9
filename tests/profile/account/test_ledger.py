import dataclasses
import json
import re
import shutil
import statistics
from pathlib import Path

import planes
import pytest
from planes import CONFIG, collected

from jaxthru import config as configuration
from jaxthru.profile.account import ledger
from jaxthru.profile.account.attribution import Attribution
from jaxthru.profile.account.measured import Measured
from jaxthru.profile.account.operations import Operations
from jaxthru.profile.account.timeline import Interval, Ran, Window, _called, whole
from jaxthru.profile.explain import breakdown, lint
from jaxthru.profile.read import buffers, hlo, xplane
from jaxthru.profile.read.facts import Facts
from jaxthru.profile.read.xplane import Event, Trace
from jaxthru.profile.show.publish import build


def small() -> ledger.Ledger:
    return ledger.Ledger(
        run=ledger.Run("quickstart", "cpu", 2, 1, "cpu", {"jax": "0"}, 512.0, 64.0),
        window=ledger.Window(5, 2, 0.5, loop_seconds=0.4, closure=0.25, noise=0.01),
        lines=tuple(ledger.Line(name, 0.05, 0.1) for name in ledger.LINES),
        matmul=ledger.Matmul(1e9, 9e8),
        scopes=(ledger.Scope("mlp", "forward", "matmul", 0.1),),
        devices=(
            ledger.Device("0", (ledger.DeviceStep(5, 0.0, 0.5, {"matmul": 0.5}),), ((0.0, 0.5, "matmul"),)),
        ),
        memory=ledger.Memory(
            None, {"parameters": 4}, (ledger.Buffer(4, "a/b", None, "other"),), ((0, 4),), 0
        ),
    )


def test_a_ledger_comes_back_from_its_json(tmp_path):
    kept = small()
    kept.write(tmp_path / "ledger.json")
    assert ledger.read(tmp_path / "ledger.json") == kept
    assert kept.seconds("matmul") == 0.05
    assert json.loads((tmp_path / "ledger.json").read_text())["lines"][0]["name"] == "matmul"


def test_another_version_is_refused():
    with pytest.raises(ValueError, match="version 2"):
        ledger.from_json(small().to_json() | {"version": 2})


def test_a_ledger_of_before_findings_knew_their_advice_is_read():
    found = dataclasses.replace(small(), lint=(ledger.Lint("copies", "a/b", "copy.1", 4.0, 0.1, "copies"),))
    data = found.to_json()
    data["lint"] = [
        {name: each[name] for name in ("rule", "scope", "instruction", "bytes", "seconds", "text")}
        for each in data["lint"]
    ]
    assert ledger.from_json(data) == found


MATMUL_PARAMETERS = 10 * 10 * 4 + 3 * 10 * 10 + 10 * 100


EXPECTED = {
    "matmul": 400e-9,
    "exposed_communication": 250e-9,  # 300 on device 0, 200 on device 1
    "dependency": 50e-9,  # device 1 has nothing to do for 100 ns
    "exposed_host_copies": 100e-9,
    "data_wait": 50e-9,
    "host_gap": 50e-9,
    "other_kernels": 100e-9,
}


def test_the_ledger_of_two_gpus(tmp_path):
    found = build(collected(tmp_path / "runs" / "small" / "1", graphs=False))
    lines = {line.name: line.seconds for line in found.lines}
    assert lines == pytest.approx({name: EXPECTED.get(name, 0.0) for name in ledger.LINES}, abs=1e-12)
    assert sum(lines.values()) == pytest.approx(found.window.step_seconds, rel=1e-12) == 1e-6
    assert found.run.config == "small" and found.run.tokens_per_step == 1000
    assert found.run.attention_span_per_token == 250
    assert found.window.attribution_seconds is None and found.window.first_step == 5
    loop = [990e-9 + step * 1e-9 for step in range(4, 30) if step not in range(5, 11)]
    assert found.window.loop_seconds == pytest.approx(sorted(loop)[len(loop) // 2], rel=2e-3)
    scopes = {(scope.layer, scope.phase, scope.line): scope.seconds for scope in found.scopes}
    assert scopes["mlp", "forward", "matmul"] == pytest.approx(400e-9)
    assert scopes["optimizer", "optimizer", "other_kernels"] == pytest.approx(100e-9)
    assert [(device.device, len(device.steps)) for device in found.devices] == [("0", 2), ("1", 2)]
    assert found.devices[0].strip[0] == (0.0, 400e-9, "matmul")


def test_who_came_last_made_the_others_wait(tmp_path):
    (found,) = build(collected(tmp_path / "runs" / "small" / "1", graphs=False)).collectives
    assert (found.name, found.kind, found.bytes, found.count) == ("all-reduce.1", "all-reduce", 2e6, 1)
    assert found.last == "1"
    assert found.seconds == pytest.approx(300e-9)  # 400 on device 0, 200 on device 1
    assert found.wait_seconds == pytest.approx(100e-9)  # 200 on device 0
    assert found.exposed_seconds == pytest.approx(250e-9)  # 300 on device 0, 200 on device 1


def test_devices_wait_only_for_those_that_they_exchange_data_with():
    """Two pairs, of which the second is later and slower: device 1 waits for 0 there, and 3 for 2."""
    groups = "replica_groups=mesh['fsdp'=2,'tensor'=2] {'tensor'}"
    text = planes.STEP.replace("to_apply=%sum", f"{groups}, to_apply=%sum")
    begun = {"0": 60, "1": 0, "2": 570, "3": 500}, {"0": 100, "1": 100, "2": 700, "3": 700}
    ran = {
        device: Event(device, "", "all-reduce.1", start, begun[1][device], "jit_train_step", "all-reduce.1")
        for device, start in begun[0].items()
    }
    measured = Measured.__new__(Measured)
    measured.attribution = Attribution(hlo.modules(text))
    measured.trace, measured.count = Trace(list(ran.values()), [], {}, 0), 4
    work = measured.attribution.find("jit_train_step", "all-reduce.1")
    of = {device: [Ran(event, "exposed_communication", work)] for device, event in ran.items()}
    idle = [Interval(0, 1000, "dependency", None)]
    measured.operations = Operations([Window(device, 1, 0, 1000, idle, ones) for device, ones in of.items()])
    (found,) = measured.collectives()
    assert found.wait_seconds == pytest.approx((60 + 70) / 4 * 1e-9)
    assert found.last in ("0", "2")


def test_the_band_is_of_the_step_that_is_closest_to_the_mean():
    measured = object.__new__(Measured)
    measured.windows, measured.step_seconds = [], 1030e-9
    for step, length in enumerate((1300, 900, 1000, 920), start=5):
        piece = Interval(2000 * step, 2000 * step + length, "matmul", None)
        measured.windows.append(Window("0", step, piece.start, piece.end, [piece], []))
    (found,) = measured.devices()
    assert [step.step for step in found.steps] == [5, 6, 7, 8]
    assert found.strip == ((0.0, 1000e-9, "matmul"),)


def test_the_products_are_taken_apart(tmp_path):
    found = build(collected(tmp_path / "runs" / "small" / "1", graphs=False)).matmul
    assert found.flops == 2 * 2e9 and found.model_flops == 6 * MATMUL_PARAMETERS * 1000
    parts = found.ideal_seconds, found.recomputation_seconds, found.frequency_seconds
    assert sum((*parts, found.inefficiency_seconds)) == pytest.approx(400e-9)
    assert found.ideal_seconds == pytest.approx(found.model_flops / 2 / 989.5e12)
    assert found.recomputation_seconds == pytest.approx((found.flops - found.model_flops) / 2 / 989.5e12)
    # The clock is 1,464 MHz while products run, and 1,980 else.
    assert found.frequency_seconds == pytest.approx(400e-9 * (1 - 1464 / 1830))
    assert found.headroom_seconds == pytest.approx(found.ideal_seconds * (1 - 1830 / 1980))


def test_graphs_hide_names_and_a_second_pass_finds_them(tmp_path):
    plain = build(collected(tmp_path / "runs" / "small" / "1", graphs=False))
    found = build(collected(tmp_path / "runs" / "small" / "2", graphs=True))
    assert {line.name: line.seconds for line in found.lines} == pytest.approx(
        {line.name: line.seconds for line in plain.lines}, abs=1e-12
    )
    assert found.window.attribution_seconds == pytest.approx(1100e-9)
    kernels = {kernel.hlo: kernel for kernel in found.kernels}
    # Named where it takes 440 ns, and scaled to what it takes as the steps are trained.
    assert kernels["gemm.1"].seconds == pytest.approx(400e-9) and kernels["gemm.1"].flops == 2e9
    assert sum(each.seconds for each in found.scopes if each.line == "matmul") == pytest.approx(400e-9)
    assert {(scope.layer, scope.line) for scope in found.scopes} >= {("mlp", "matmul")}


def test_noise_is_the_spread_of_steps_that_were_not_profiled(tmp_path):
    window = build(collected(tmp_path / "runs" / "small" / "1", graphs=False)).window
    others = [990e-9 + step * 1e-9 for step in (4, *range(11, 30))]
    low, middle, high = statistics.quantiles(others, n=4)
    assert window.loop_seconds == pytest.approx(middle)
    assert window.noise == pytest.approx((high - low) / middle)
    assert window.closure == pytest.approx(1000e-9 / middle - 1)


def test_a_trace_without_a_device_is_said(tmp_path):
    folder = collected(tmp_path / "runs" / "small" / "1", graphs=False)
    shutil.rmtree(folder / "production")
    planes.write(folder / "production" / "0", planes.Plane("/host:CPU", {}))
    with pytest.raises(ValueError, match="nothing that ran on a device"):
        build(folder)


FACTS = Facts(6.0 * MATMUL_PARAMETERS, 60.0, 1, 700, {"embed": 10}, (), {"none": 0}, {"none": 0}, ("router",))


def test_a_runs_own_facts_and_scopes_count(tmp_path):
    folder = collected(tmp_path / "runs" / "small" / "1", graphs=False)
    older = build(folder)
    assert older.matmul.model_flops == FACTS.flops(1000, 0)
    text = (folder / "step.hlo.txt").read_text().replace("/mlp/", "/router/")
    (folder / "step.hlo.txt").write_text(text)
    about = json.loads((folder / "collected.json").read_text())
    about |= {"model": dataclasses.asdict(FACTS)}
    (folder / "collected.json").write_text(json.dumps(about))
    (folder.parents[1] / "config.json").write_text(json.dumps(CONFIG | {"model": {"family": "not.there"}}))
    rows = folder.parents[1] / "metrics.jsonl"
    rows.write_text(rows.read_text().replace('"model_tflops": 1e-06', '"attention_span": 250000.0'))
    found = build(folder)
    assert found.model == FACTS and found.matmul == older.matmul
    assert found.run.attention_span_per_token == 250
    assert {scope.layer for scope in older.scopes} - {scope.layer for scope in found.scopes} == {"mlp"}
    assert "router" in {scope.layer for scope in found.scopes}


def test_a_trace_and_its_program_are_read_once(tmp_path, monkeypatch):
    read, opened, parsed = xplane.read, [], []
    monkeypatch.setattr(xplane, "read", lambda folder: opened.append(folder.name) or read(folder))
    modules = hlo.modules
    monkeypatch.setattr(hlo, "modules", lambda text: parsed.append(text) or modules(text))
    build(collected(tmp_path / "runs" / "small" / "1", graphs=True))
    assert sorted(opened) == ["attribution", "production"] and len(parsed) == 2


def test_what_was_not_collected_is_said(tmp_path):
    with pytest.raises(ValueError, match="was the run profiled"):
        build(tmp_path / "runs" / "small" / "1" / "profile" / "5")


def test_of_rows_without_a_span_it_follows_from_their_flops(tmp_path):
    folder = collected(tmp_path, graphs=False)
    newer = build(folder)
    done = newer.model.flops(1000, 250_000) / 1e12
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    for row in rows:
        del row["attention_span"]
        row["model_tflops"] = done / row["step_seconds"]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert build(folder).run.attention_span_per_token == pytest.approx(250)
    assert build(folder).matmul == newer.matmul


def test_steps_that_lack_kernels_are_left_out():
    """CUPTI may lose those at a trace's start, on one device or all; how many copies run in a step varies."""

    def window(device: str, step: int, kernels: int, others: int = 0, stream: str = "Stream #1") -> Window:
        ran = [Event(device, stream, "k", at, at + 1, "jit_train_step") for at in range(kernels)]
        ran += [Event(device, "Stream #2", "c", at, at + 1, kind="to_host") for at in range(others)]
        ran += [Event(device, stream, "e", at, at + 1, "jit_evaluate") for at in range(others)]
        return Window(device, step, 0, 1000, [], [Ran(event, "matmul", None) for event in ran])

    modules = {"jit_train_step"}
    first = [window("0", 1, 100), window("0", 2, 99), window("0", 3, 100, others=50)]
    second = [window("1", 1, 40, others=60), window("1", 2, 100), window("1", 3, 100)]
    assert whole([*first, *second], modules) == [*first[1:], *second[1:]]
    assert whole([*first, window("1", 1, 3), window("1", 2, 0)], modules) == first
    on_cpu = [window("0", 1, 10, stream="tf_pool"), window("0", 2, 7, stream="tf_pool")]
    assert whole(on_cpu, modules) == on_cpu
    with pytest.raises(ValueError, match="each step lacks kernels"):
        whole([window("0", 1, 9), window("0", 2, 1), window("1", 1, 1), window("1", 2, 9)], modules)


def test_a_copy_to_the_host_was_called_for_with_what_runs_next():
    """CUPTI does not say when the host called for it; without that a late host looks like a late kernel."""

    def ran(kind: str, launched: int | None = None) -> Ran:
        return Ran(Event("0", "Stream #1", "k", 0, 1, kind=kind, launched=launched), "matmul", None)

    all_of = [
        ran("kernel", 5),
        ran("to_host"),
        ran("to_device"),
        ran("kernel", 90),
        ran("kernel"),
        ran("to_host"),
    ]
    assert _called(all_of, [], [], 1) == [5, 90, 90, 90, None, None]


def test_a_run_that_was_stopped_between_the_passes(tmp_path):
    folder = collected(tmp_path / "runs" / "small" / "1", graphs=True)
    about = json.loads((folder / "collected.json").read_text())
    del about["passes"]["production"]
    (folder / "collected.json").write_text(json.dumps(about))
    with pytest.raises(ValueError, match="ended before its steps were traced"):
        build(folder)


ROOT = Path(__file__).resolve().parents[3]
QUICKSTART = ROOT / "configs" / "quickstart.py"
PAGE = (ROOT / "docs" / "ledger.md").read_text()


def rows(title: str, following: str) -> dict[str, tuple[str, ...]]:
    """Returns the cells of a section's table of the page, by what its first cell names."""
    section = PAGE[PAGE.index(f"\n## {title}\n") : PAGE.index(f"\n## {following}\n") if following else None]
    found = re.findall(r"^\| `(\w+)` \|(.*)\|$", section, re.MULTILINE)
    assert found, title
    return {name: tuple(cell.strip() for cell in cells.split(" | ")) for name, cells in found}


def test_the_page_explains_each_line_and_part_of_a_ledger():
    fields = {field.name for field in dataclasses.fields(ledger.Ledger)}
    parts = {f"{name}_seconds" for name in breakdown.MATMUL_PARTS}
    tables = {
        ("Lines", "matmul"): set(ledger.LINES),
        ("matmul", "How it is measured"): parts,
        ("Memory", "Lint"): {*buffers.CATEGORIES, "fragmentation", "beside"},
        ("Lint", "The rest of the file"): {rule.__name__ for rule in lint.RULES},
        ("The rest of the file", ""): fields - {"lines", "matmul", "memory", "lint"},
    }
    for (title, following), named in tables.items():
        found = rows(title, following)
        assert set(found) == named, title
        assert all(len(cells) == 2 and all(cells) for cells in found.values()), title
    assert {"lines", "matmul", "memory", "lint"} <= fields


def test_the_page_names_settings_that_there_are_and_links_where_they_are_made():
    tree = configuration.to_dict(configuration.load(QUICKSTART))
    linked = re.findall(r"\[((?:`[a-z]+\.\w+`(?:, )?)+)\]\(\.\./([\w/.]+)\)", PAGE)
    assert len(linked) > 30
    for names, path in linked:
        text = (ROOT / path).read_text()
        for group, name in re.findall(r"`([a-z]+)\.(\w+)`", names):
            assert name in tree.get(group, ()), f"{group}.{name}"
            assert re.search(rf"^    {name}: ", text, re.MULTILINE), f"{group}.{name} is not made in {path}"
