import jax
import jax.numpy as jnp
import pytest
from planes import Plane, copy, data, kernel, write

from jaxthru.profile.collect import clocks
from jaxthru.profile.collect import trace as trace_module
from jaxthru.profile.read import xplane


def gpu(number: int = 0) -> Plane:
    return Plane(
        f"/device:GPU:{number}",
        {
            "Stream #14(Compute,Memset)": [
                kernel("nvjet_tst_128x128", 100, 200, "gemm.1", correlation_id=7),
                ("Memset", 200, 210, {}),
            ],
            "Stream #15(MemcpyH2D)": [copy("H2D", 150, 250, 4096, correlation_id=8)],
            "_counters_": [("GPC Clock Frequency (Hz)", 120, 120, {"value": 1.5e9})],
        },
    )


HOST = Plane(
    "/host:CPU",
    {
        "1": [
            ("dispatch", 10, 60, {"step_num": 3}),
            ("data_wait", 70, 90, {}),
            ("cuLaunchKernel", 50, 55, {"correlation_id": 7}),
            ("something", 0, 5, {}),
        ]
    },
)


def test_a_gpus_kernels_copies_and_counters():
    trace = xplane.table(data(gpu(), HOST, begun=10**15))
    first, second, third = trace.events
    assert (first.name, first.hlo, first.module) == ("nvjet_tst_128x128", "gemm.1", "jit_train_step")
    assert (first.start, first.end, first.launched, first.kind) == (100, 200, 50, "kernel")
    assert (second.kind, second.bytes, second.launched) == ("to_device", 4096, None)
    assert third.kind == "memset"
    assert trace.counters == {"0": {"GPC Clock Frequency (Hz)": [(120, 1.5e9)]}}
    assert [(span.name, span.step) for span in trace.host] == [("dispatch", 3), ("data_wait", None)]
    assert trace.begun == 10**15 and trace.devices == ["0"]


def test_what_is_no_text_is_left_out():
    """As the profiler's own options are, in its encoding of a number like 500."""
    odd = Plane("Task Environment", {}, {"profile_options": b"\xf4\x03"})
    assert xplane.table(data(odd, begun=7)).begun == 7


def test_a_trace_taken_with_the_options_for_counters_is_read(tmp_path):
    """XLA notes the options in the trace, on a CPU too."""
    options = trace_module.options(clock=False)
    options.advanced_configuration = clocks.SAMPLING
    with jax.profiler.trace(str(tmp_path / "0"), profiler_options=options):
        jax.block_until_ready(jax.jit(lambda x: x @ x)(jnp.ones((64, 64))))
    assert xplane.read(tmp_path).begun > 0


def test_what_the_host_launches_on_a_gpu_did_not_run_on_the_host():
    launch = Plane(
        "/host:CPU", {"2": [("Thunk", 40, 60, {"hlo_op": "gemm.1", "hlo_module": "jit_train_step"})]}
    )
    found = [event.name for event in xplane.table(data(launch, gpu())).events]
    assert found == ["nvjet_tst_128x128", "MemcpyH2D", "Memset"]


def test_a_cpus_instruction_lasts_until_its_end_mark():
    """What an instruction started in other threads goes on after its own event."""
    stats = {"hlo_op": "dot.1", "hlo_module": "jit_f", "device_ordinal": 2048, "_p": 11}
    host = Plane(
        "/host:CPU",
        {
            "a": [("dot.1", 10, 12, stats), ("copy.2", 12, 14, stats | {"hlo_op": "copy.2", "_p": 12})],
            "b": [("end: dot.1", 30, 31, {"_c": 11})],
        },
    )
    trace = xplane.table(data(host))
    assert [(event.hlo, event.start, event.end, event.device) for event in trace.events] == [
        ("dot.1", 10, 31, "0"),
        ("copy.2", 12, 14, "0"),
    ]


def test_hosts_are_put_on_one_clock_by_their_collectives(tmp_path):
    """The second host's clock is 1,000 ns ahead; its wall time says nothing of it."""
    for process, ahead in ((0, 0), (1, 1000)):
        stream = {
            "Stream #1": [
                kernel("nccl", at + ahead + late, at + ahead + 100, "all-reduce.1")
                for at, late in ((0, 0), (500, 40), (900, 10))
            ]
            + [kernel("add", 300 + ahead, 320 + ahead, "add.1")]
        }
        write(tmp_path / str(process), Plane("/device:GPU:0", stream), begun=10**15)
    trace = xplane.read(tmp_path)
    assert trace.devices == ["0/0", "1/0"]
    adds = [event.start for event in trace.events if event.hlo == "add.1"]
    assert adds == [300, 300]


def test_no_trace_or_a_damaged_one_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="holds no trace"):
        xplane.read(tmp_path)
    (tmp_path / "cut.xplane.pb").write_bytes(b"\x0a\xff\xff")
    with pytest.raises(ValueError, match=r"cut\.xplane\.pb: a damaged trace"):
        xplane.read(tmp_path)
