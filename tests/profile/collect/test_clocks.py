import ctypes
import inspect
import sys
import time

import pytest

from jaxthru.profile.account import frequency
from jaxthru.profile.collect import clocks
from jaxthru.profile.read.xplane import Trace
from jaxthru.runtime import nvml

BUSES = ("0000:a3:00.0", "0000:19:00.0")  # as CUDA numbers them: the faster of two comes first


def trace(counters: dict | None = None) -> Trace:
    return Trace([], [], counters or {}, 10_000)


def test_without_a_gpu_there_is_no_clock():
    with clocks.sampled(["0"]) as samples:
        time.sleep(0.05)
    assert samples.devices == {}
    found = frequency.clock(trace(), samples, 0, 100, [])
    assert (found.source, found.mean_mhz, found.samples) == ("none", None, ())


def test_cupti_counts_where_products_run():
    counters = {"0": {"GPC Clock Frequency (Hz)": [(10, 1.4e9), (20, 1.6e9), (50, 1.9e9), (200, 1e9)]}}
    found = frequency.clock(trace(counters), clocks.Samples({}), 0, 100, [(5, 30)])
    assert found.source == "cupti" and found.mean_mhz == 1500
    assert found.samples == ((10e-9, 1400), (20e-9, 1600), (50e-9, 1900))


@pytest.mark.parametrize(
    ("only", "capabilities", "may"),
    [(1, "0", False), (1, "1ffffffffff", True), (0, "0", True), (None, "0", True)],
)
def test_counters_are_asked_for_where_the_driver_gives_them(tmp_path, monkeypatch, only, capabilities, may):
    params, status = tmp_path / "params", tmp_path / "status"
    if only is not None:
        params.write_text(f"EnableMSI: 1\nRmProfilingAdminOnly: {only}\n")
    status.write_text(f"CapPrm:\t1\nCapEff:\t{capabilities}\n")
    monkeypatch.setattr(clocks, "RESTRICTED", params)
    monkeypatch.setattr(clocks, "STATUS", status)
    monkeypatch.setattr(clocks, "bus_ids", lambda: BUSES)
    assert bool(clocks.sampling(2)) is may
    monkeypatch.setattr(clocks, "bus_ids", lambda: ())  # nobody knows which GPUs the process sees
    assert not clocks.sampling(2)


@pytest.mark.parametrize(("local", "may"), [(2, True), (1, False)])
def test_gpus_of_other_processes_are_not_sampled(tmp_path, monkeypatch, local, may):
    monkeypatch.setattr(clocks, "bus_ids", lambda: BUSES)
    monkeypatch.setattr(clocks, "RESTRICTED", tmp_path / "none")
    assert bool(clocks.sampling(local)) is may


def test_nvml_also_knows_power_and_reasons(tmp_path):
    rows = [(10_010, 1500.0, 690.0, 0x4), (10_050, 1700.0, 700.0, 0x4 | 0x20), (99_999, 1.0, 1.0, 0)]
    folder = tmp_path / "0"
    folder.mkdir()
    clocks.Samples({"0": rows}).write(folder / "clocks.json")
    samples = clocks.read(tmp_path)
    assert samples.devices == {"0": rows}
    found = frequency.clock(trace(), samples, 0, 100, [])
    assert found.source == "nvml" and found.mean_mhz == 1600
    assert found.power == ((10e-9, 690), (50e-9, 700))
    assert found.cap_reasons == {"power cap": 1.0, "thermal (software)": 0.5}


class Library:
    """NVML of one GPU, by the signatures of nvidia-ml-py; this GPU does not tell its power."""

    NVML_CLOCK_SM = 1

    class NVMLError(Exception):
        pass

    def nvmlDeviceGetHandleByPciBusId(self, bus_id):
        if bus_id not in BUSES:
            raise self.NVMLError("not found")
        return 42

    def nvmlDeviceGetClockInfo(self, handle, kind):
        return 1480 if (handle, kind) == (42, self.NVML_CLOCK_SM) else 0

    def nvmlDeviceGetPowerUsage(self, handle):
        raise self.NVMLError("not supported")

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle):
        return 4


def test_the_package_has_what_is_asked_of_it():
    pynvml = pytest.importorskip("pynvml", reason="needs nvidia-ml-py")
    for name in (*dir(Library), "nvmlInit"):
        assert name.startswith("__") or hasattr(pynvml, name), name
    for name in ("nvmlDeviceGetHandleByPciBusId", "nvmlDeviceGetClockInfo"):
        own = list(inspect.signature(getattr(Library, name)).parameters)[1:]
        assert len(inspect.signature(getattr(pynvml, name)).parameters) >= len(own), name


@pytest.mark.parametrize("driver", [True, False])
def test_a_missing_package_is_said_once_where_there_is_a_gpu(tmp_path, monkeypatch, caplog, driver):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(nvml, "RESTRICTED", tmp_path / "params")
    if driver:
        (tmp_path / "params").touch()
    clocks.nvml.cache_clear()
    for _ in range(2):
        with clocks.sampled(["0"]) as samples:
            assert samples.devices == {}
    clocks.nvml.cache_clear()
    said = [record.getMessage() for record in caplog.records]
    assert (
        said == ['neither clock nor energy is read: needs nvidia-ml-py, pip install "jaxthru[gpu]"'] * driver
    )


def test_nvml_is_asked_while_steps_run(monkeypatch):
    monkeypatch.setattr(clocks, "nvml", Library)
    monkeypatch.setattr(clocks, "INTERVAL", 0.001)
    before = time.time_ns()
    with clocks.sampled([BUSES[0], "0000:ff:00.0"]) as samples:
        deadline = time.monotonic() + 60
        while not samples.devices["0"] and time.monotonic() < deadline:
            time.sleep(0.001)
    assert list(samples.devices) == ["0"]
    at, *rest = samples.devices["0"][0]
    assert before <= at <= time.time_ns() and rest == [1480.0, 0.0, 4]


class Driver:
    """CUDA's, of a process that sees two GPUs."""

    def __init__(self, fails: str = ""):
        self.fails = fails

    def cuInit(self, flags):
        return 3 if self.fails == "init" else flags

    def cuDeviceGetCount(self, count):
        count._obj.value = len(BUSES)
        return 0

    def cuDeviceGetPCIBusId(self, text, size, device):
        text.value = BUSES[device].encode()
        return 0 if size > len(text.value) and self.fails != "name" else 1


@pytest.fixture
def asked_anew():
    nvml.bus_ids.cache_clear()
    yield
    nvml.bus_ids.cache_clear()


def test_devices_are_those_that_cuda_numbers_so(monkeypatch, asked_anew):
    """NVML's own numbers are of all GPUs of the host, in another order."""
    monkeypatch.setattr(ctypes, "CDLL", lambda name: {"libcuda.so.1": Driver()}[name])
    assert nvml.names([0, 1]) == list(BUSES)
    assert nvml.names([1]) == ["0000:19:00.0"]  # the second process of a host, which has the second GPU
    assert nvml.names([1, 2]) == ["0000:19:00.0"]


@pytest.mark.parametrize("fails", ["library", "init", "name"])
def test_a_driver_that_does_not_answer_names_no_device(monkeypatch, asked_anew, fails):
    def opened(name):
        if fails == "library":
            raise OSError(f"{name}: cannot open shared object file")
        return Driver(fails)

    monkeypatch.setattr(ctypes, "CDLL", opened)
    assert nvml.names([0, 1]) == []


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("NVIDIA H200", (1830, 1980)),
        ("NVIDIA H100 80GB HBM3", (1830, 1980)),
        ("NVIDIA H200 NVL", (1545, 1785)),
        ("NVIDIA H100 PCIe", (None, None)),
        ("cpu", (None, None)),
    ],
)
def test_reference_clocks(kind, expected):
    assert frequency.reference(kind) == expected


def test_long_series_are_thinned():
    counters = {"0": {clocks.COUNTER: [(at, 1e9) for at in range(5000)]}}
    found = frequency.clock(trace(counters), clocks.Samples({}), 0, 5000, [])
    assert 250 <= len(found.samples) <= frequency.MOST
