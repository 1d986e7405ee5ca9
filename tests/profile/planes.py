"""Traces written by hand: XSpace as text, with the planes, lines and stats that XLA's profiler writes."""

import dataclasses
import json
from pathlib import Path

from jax.profiler import ProfileData


@dataclasses.dataclass
class Plane:
    """lines: {name: [(event, start ns, end ns, stats)]}."""

    name: str
    lines: dict[str, list[tuple[str, int, int, dict]]]
    stats: dict = dataclasses.field(default_factory=dict)

    def text(self) -> str:
        names: dict[str, int] = {}
        keys: dict[str, int] = {}

        def stats(of: dict) -> str:
            return " ".join(
                f"stats {{ metadata_id: {keys.setdefault(key, len(keys) + 1)} {_value(value)} }}"
                for key, value in of.items()
            )

        lines = []
        for number, (line, events) in enumerate(self.lines.items()):
            inner = " ".join(
                f"events {{ metadata_id: {names.setdefault(name, len(names) + 1)} offset_ps: {start * 1000} "
                f"duration_ps: {(end - start) * 1000} {stats(of)} }}"
                for name, start, end, of in events
            )
            lines.append(f"lines {{ id: {number} name: {json.dumps(line)} timestamp_ns: 0 {inner} }}")
        own = stats(self.stats)
        metadata = [
            f"{kind}_metadata {{ key: {number} value {{ id: {number} name: {json.dumps(name)} }} }}"
            for kind, table in (("event", names), ("stat", keys))
            for name, number in table.items()
        ]
        return f"planes {{ name: {json.dumps(self.name)} {' '.join((*lines, *metadata, own))} }}"


def _value(value) -> str:
    if isinstance(value, str):
        return f"str_value: {json.dumps(value)}"
    if isinstance(value, bytes):
        return 'bytes_value: "' + "".join(f"\\{byte:03o}" for byte in value) + '"'
    return f"double_value: {value}" if isinstance(value, float) else f"uint64_value: {value}"


def data(*planes: Plane, begun: int = 0) -> ProfileData:
    """Returns planes as `ProfileData.from_file` would. begun: wall time of the trace's start, ns."""
    return ProfileData.from_serialized_xspace(serialized(*planes, begun=begun))


def serialized(*planes: Plane, begun: int = 0) -> bytes:
    environment = Plane("Task Environment", {}, {"profile_start_time": begun})
    text = " ".join(plane.text() for plane in (*planes, environment))
    return ProfileData.text_proto_to_serialized_xspace(text)


def write(folder: Path, *planes: Plane, begun: int = 0) -> None:
    """Writes a trace where XLA would."""
    path = folder / "plugins" / "profile" / "now" / "host.xplane.pb"
    path.parent.mkdir(parents=True)
    path.write_bytes(serialized(*planes, begun=begun))


def kernel(name: str, start: int, end: int, op: str = "", module: str = "jit_train_step", **stats) -> tuple:
    """Returns a GPU's kernel."""
    return name, start, end, {"hlo_op": op or name, "hlo_module": module, **stats}


STEP = """HloModule jit_train_step, is_scheduled=true

ENTRY %main (a: bf16[1000,1000]) -> bf16[1000,1000] {
  %a = bf16[1000,1000]{1,0} parameter(0), metadata={op_name="state['params']"}
  %gemm.1 = bf16[1000,1000]{1,0} dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}, \
    metadata={op_name="jit(train_step)/jvp(model)/mlp/dot_general"}
  %all-reduce.1 = bf16[1000,1000]{1,0} all-reduce(%gemm.1), to_apply=%sum, \
    metadata={op_name="jit(train_step)/transpose(jvp(model))/mlp/dot_general"}
  ROOT %add.1 = bf16[1000,1000]{1,0} add(%all-reduce.1, %a), \
    metadata={op_name="jit(train_step)/optimizer/add"}
}
""".replace("\\\n   ", "")
"""A step: a product of 2e9 FLOPs, a sum over devices, and an update."""


def step(
    device: int, number: int, begun: int, graph: bool = False, product: int = 400
) -> dict[str, list[tuple]]:
    """Returns what a GPU runs in a step of 1,000 ns, by stream. Device 1 comes to the all-reduce 200 ns after
    device 0, and both end it at 700. graph: as a CUDA graph, in which nothing bears its own name.
    product: nanoseconds that the matmul takes."""
    op = lambda name: "command_buffer_1" if graph else name  # noqa: E731
    late = 200 * device
    compute = [
        kernel("nvjet_tst_128x128", begun, begun + product, op("gemm.1"), correlation_id=10 * number + 1),
        kernel("add_1", begun + 900, begun + 1000, op("add.1"), correlation_id=10 * number + 2),
    ]
    sum_ = kernel("ncclDevKernel_AllReduce", begun + 300 + late, begun + 700, op("all-reduce.1"))
    return {
        "Stream #1(Compute)": compute,
        "Stream #2(Compute)": [sum_],
        "Stream #3(MemcpyH2D)": [copy("H2D", begun + 650, begun + 800, 1 << 20)],
    }


def steps(first: int, count: int, graph: bool = False, length: int = 1000, product: int = 400) -> list[Plane]:
    """Returns two GPUs' planes and their host's, of so many steps and the one after. The loop waits for data
    from 800 to 850 of each step, and calls for its last kernel at 870, when the devices have run out."""
    planes = []
    for device in (0, 1):
        lines: dict[str, list] = {}
        for number in range(count + 1):
            for line, events in step(device, number, number * length, graph, product).items():
                lines.setdefault(line, []).extend(events)
        lines["_counters_"] = [
            ("GPC Clock Frequency (Hz)", at, at, {"value": 1.464e9 if at % length < 400 else 1.98e9})
            for at in range(50, (count + 1) * length, 100)
        ]
        planes.append(Plane(f"/device:GPU:{device}", lines))
    host = []
    for number in range(count + 1):
        begun = number * length
        host += [
            ("dispatch", begun - 100 + length, begun - 50 + length, {"step_num": first + number}),
            ("data_wait", begun + 800, begun + 850, {}),
            ("cuLaunchKernel", begun + 1, begun + 2, {"correlation_id": 10 * (number + 1) + 1}),
            ("cuLaunchKernel", begun + 870, begun + 880, {"correlation_id": 10 * number + 2}),
        ]
    return [*planes, Plane("/host:CPU", {"1": host})]


def copy(kind: str, start: int, end: int, size: int, **stats) -> tuple:
    """Returns a copy, "H2D" or "D2H"."""
    details = f"kind_src:pinned kind_dst:device size:{size} dest:0 async:1"
    return f"Memcpy{kind}", start, end, {"memcpy_details": details, **stats}


SHAPE = {"vocabulary": 100, "layers": 1, "embed": 10, "heads": 1, "kv_heads": 1, "head_dim": 10, "mlp": 10}
CONFIG = {
    "model": SHAPE,
    "mesh": {"data": 2, "fsdp": 1, "tensor": 1},
    "precision": {"compute": "bfloat16"},
    "data": {"sequence": 64},
}


def collected(run: Path, *, graphs: bool) -> Path:
    """Writes what a run of two H200 leaves: steps 5 and 6 as trained, and, with graphs, 8 and 9 in 1,100 ns
    each without them, of which the product has 40 more."""
    folder = run / "profile" / "5"
    passes = {"production": {"first_step": 5, "steps": 2}}
    write(folder / "production" / "0", *steps(5, 2, graph=graphs))
    folder.joinpath("step.hlo.txt").write_text(STEP)
    if graphs:
        passes["attribution"] = {"first_step": 8, "steps": 2}
        write(folder / "attribution" / "0", *steps(8, 2, length=1100, product=440))
        folder.joinpath("attribution.hlo.txt").write_text(STEP)
    about = {"platform": "gpu", "device_kind": "NVIDIA H200", "devices": 2, "processes": 1}
    about |= {"peak_flops": 989.5e12, "peak_bytes": None, "host_pinned_bytes": 7, "passes": passes}
    folder.joinpath("collected.json").write_text(json.dumps(about))
    run.joinpath("config.json").write_text(json.dumps(CONFIG))
    run.joinpath("environment.json").write_text(json.dumps({"versions": {"jax": "0"}}))
    rows = [
        {"step": step, "tokens": 1000, "attention_span": 250_000.0, "step_seconds": 990e-9 + step * 1e-9}
        for step in range(1, 30)
    ]
    run.joinpath("metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder
