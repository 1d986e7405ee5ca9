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
    return f"double_value: {value}" if isinstance(value, float) else f"uint64_value: {value}"


def data(*planes: Plane, begun: int = 0) -> ProfileData:
    """Returns planes as `ProfileData.from_file` would. begun: wall time of the trace's start, ns."""
    return ProfileData.from_serialized_xspace(serialized(*planes, begun=begun))


def serialized(*planes: Plane, begun: int = 0) -> bytes:
    environment = Plane("Task Environment", {}, {"profile_start_time": begun})
    text = " ".join(plane.text() for plane in (*planes, environment))
    return ProfileData.text_proto_to_serialized_xspace(text)


def write(folder: Path, *planes: Plane, begun: int = 0) -> None:
    """Writes a trace where `profile.trace` would."""
    path = folder / "plugins" / "profile" / "now" / "host.xplane.pb"
    path.parent.mkdir(parents=True)
    path.write_bytes(serialized(*planes, begun=begun))


def kernel(name: str, start: int, end: int, op: str = "", module: str = "jit_train_step", **stats) -> tuple:
    """Returns a GPU's kernel."""
    return name, start, end, {"hlo_op": op or name, "hlo_module": module, **stats}


def copy(kind: str, start: int, end: int, size: int, **stats) -> tuple:
    """Returns a copy, "H2D" or "D2H"."""
    details = f"kind_src:pinned kind_dst:device size:{size} dest:0 async:1"
    return f"Memcpy{kind}", start, end, {"memcpy_details": details, **stats}
