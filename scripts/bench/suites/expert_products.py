"""Rows of grouped matmuls and layers of experts, timed by measure/kernel.py, and beside them PyTorch's."""

import dataclasses
import shlex
import sys
from pathlib import Path

import blocks
import comparison
from suites.rows import Block, Row, Setup, lines_of

OWN = ("mosaic_gpu", "triton", "xla", "reference")
Rates = dict[str, dict[str, float]]
"""{shape or call: {contender: TFLOP/s}}."""


@dataclasses.dataclass(frozen=True)
class Timed(Row):
    """What measure/kernel.py knows by this name, timed in turns in one process; and the same by PyTorch in
    another. shapes: a group of the operation's. part: of what the peer prints. seconds: of our block, about.
    """

    config: str = ""
    common: str = ""
    operation: str = ""
    shapes: str = ""
    part: str = ""
    seconds: float = 90.0
    products, reads, small = (), False, ""

    def wanted(self, done: list[dict]) -> list[Block]:
        return [Block("ours", 1, self.seconds), Block("torch", 1, 60.0)]

    def check(self, setup: Setup) -> None:
        """Nothing of it can be set."""

    def program(self, setup: Setup, *more: object) -> list[str]:
        """Returns the command line of measure/kernel.py."""
        script = str(blocks.HERE / "measure" / "kernel.py")
        words = [self.operation, "--shape", "tiny" if setup.tiny else self.shapes, *map(str, more)]
        if not setup.tiny:
            return [sys.executable, script, *words]
        brief = ["--warmup-seconds", "0", "--timed-seconds", "0"]
        return ["env", "JAX_PLATFORMS=cpu", sys.executable, script, *words, *brief]

    def command(self, name: str, setup: Setup) -> list[str]:
        if name == "torch":
            words = ["--part", self.part, *(["--tiny"] if setup.tiny else [])]
            return [setup.torch_python, "-m", "peers.torch_experts", *words]
        table = table_of(setup)
        return self.program(setup, *(["--table", table] if table.exists() else []))

    def of_torch(self, line: dict) -> Rates:
        """Returns the rates of what the peer printed, {shape: {contender: rate}}."""
        raise NotImplementedError

    def of_ours(self, line: dict) -> Rates:
        """Returns the rates of what measure/kernel.py printed."""
        raise NotImplementedError

    def found(self, setup: Setup, done: list[dict]) -> dict:
        rates: Rates = {}
        for name, read in (("ours", self.of_ours), ("torch", self.of_torch)):
            for line in lines_of(done, name):
                for shape, of in read(line).items():
                    rates[shape] = rates.get(shape, {}) | of
        found = {"rates": rates, "spread": None}
        for shape, of in rates.items():
            own = max((of[name] for name in OWN if name in of), default=None)
            if own is not None:
                others = {name: rate for name, rate in of.items() if name not in OWN and rate}
                found |= {shape: own} | {f"{shape} / {name}": own / rate for name, rate in others.items()}
        return found

    def details(self, found: dict) -> str:
        rates = found["rates"]
        names = list(dict.fromkeys(name for of in rates.values() for name in of))
        lines = [[shape, *(str(of.get(name, "")) for name in names)] for shape, of in rates.items()]
        return comparison.markdown(("TFLOP/s", *names), lines)


def tflops(contenders: dict, *within: str) -> dict[str, float]:
    """Returns the rates of those that ran. within: keys under which each says it."""
    found = {}
    for name, line in contenders.items():
        for key in within:
            line = line.get(key) if isinstance(line, dict) else None
        if isinstance(line, dict) and "tflops" in line:
            found[name] = line["tflops"]
    return found


class Calls(Timed):
    """Grouped matmuls, each beside a dense one of as many FLOPs in the same process."""

    def of_ours(self, line):
        return {shape: tflops(of) for shape, of in line["contenders"].items()}

    def of_torch(self, line):
        names = {"dense": "torch_dense"}  # of its own process
        return {
            shape: {names.get(name, name): rate for name, rate in tflops(of).items()}
            for shape, of in line["calls"].items()
        }


class Float8(Calls):
    """All grouped matmuls of a layer, forward and backward, with products in float8 beside all in bfloat16:
    for each model the time of these over that of those."""

    def wanted(self, done):
        return [Block("ours", 1, self.seconds)]

    def refuses(self, setup):
        return "its kernels are of Hopper" if setup.tiny else ""

    def command(self, name, setup):
        table = table_of(setup)
        times = ["--warmup-seconds", "1", "--timed-seconds", "0.4"]
        return self.program(setup, *times, *(["--table", table] if table.exists() else []))

    def found(self, setup, done):
        found = super().found(setup, done)
        times: dict[str, list[float]] = {}
        for case, of in found["rates"].items():
            model = case.removeprefix("float8_").rsplit("_", 2)[0]  # of MODEL_up_product
            plain = max((rate for name, rate in of.items() if name in OWN), default=None)
            if plain is None:
                continue
            fastest = max(rate for name, rate in of.items() if name in OWN or name.startswith("float8"))
            share = 2.0 if "_up_" in case else 1.0  # gate and up are twice the down map's FLOPs
            both = times.setdefault(model, [0.0, 0.0])
            both[0] += share / plain
            both[1] += share / fastest
        return found | {model: plain / float8 for model, (plain, float8) in times.items()}


class Layers(Timed):
    """Whole layers, forward and backward; `shape_forward` is the forward pass alone."""

    passes = (("", "both"), ("_forward", "forward"))

    def found(self, setup, done):
        found = super().found(setup, done)
        for line in lines_of(done, "ours"):
            for shape, of in line["contenders"].items():
                whole = [of[name]["both"]["milliseconds"] for name in OWN if "both" in of.get(name, {})]
                if whole and (rest := of.get("around", {}).get("around")):
                    found[f"{shape}_around"] = rest["milliseconds"] / min(whole)
        return found

    def of_ours(self, line):
        shapes = line["contenders"]
        return {f"{name}{more}": tflops(shapes[name], key) for name in shapes for more, key in self.passes}

    def of_torch(self, line):
        found = {}
        for name, forms in line["layers"].items():
            for more, key in self.passes:
                rates = tflops(forms, key)
                found[name + more] = {"torch": max(rates.values())} if rates else {}
        return found


class Float8Layers(Layers):
    """Whole layers with experts in float8 beside bfloat16: `shape / float8` is the share of its time."""

    def wanted(self, done):
        return [Block("ours", 1, self.seconds)]

    def refuses(self, setup):
        return "its kernels are of Hopper" if setup.tiny else ""


class TunedTiles(Calls):
    """Hopper's kernel in other tiles, and the table of the fastest, which the rows after it take."""

    def wanted(self, done):
        return [Block("ours", 1, self.seconds)]

    def refuses(self, setup):
        return "its kernels are of NVIDIA GPUs" if setup.tiny else ""

    def command(self, name, setup):
        folder = setup.kept("tiles")
        record = folder / f"{self.shapes}.json"
        times = ["--warmup-seconds", "1", "--timed-seconds", "0.4"]
        measure = self.program(setup, "--tiles", *times, "--output", record)
        make = [sys.executable, str(blocks.HERE / "measure" / "experts_tiles.py"), str(record)]
        typed = f"{shlex.join(measure)} >&2 && {shlex.join([*make, '--table', str(table_of(setup))])}"
        return ["bash", "-c", f"mkdir -p {shlex.quote(str(folder))} && {typed}"]

    def found(self, setup, done):
        entries = [of for line in lines_of(done, "ours") for of in line["entries"].values()]
        table = {key: entry for of in entries for key, entry in of.items()}
        slower = sum(not entry["faster"] for entry in table.values()) if table else None
        return {"slower_shapes": slower, "entries": table, "spread": None}

    def details(self, found):
        lines = []
        for key, of in found["entries"].items():
            m, n, cluster = (of["tiles"][name] for name in ("m", "n", "cluster"))
            shared = "w" if of["tiles"]["shares_w"] else ""
            others = cluster, shared, of["tiles"]["late"], of["microseconds"], of["faster"]
            lines.append([key, f"{m} × {n}", *map(str, others)])
        return comparison.markdown(("shape", "tiles", "cluster", "shares", "late", "µs", "faster"), lines)


def table_of(setup: Setup) -> Path:
    """Returns the file of the tiles that were found in this run, which may not exist."""
    return setup.kept("tiles") / "tile_table.json"
