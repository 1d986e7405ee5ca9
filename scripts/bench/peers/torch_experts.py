"""Times PyTorch's grouped matmuls and a compiled layer of experts made of them: prints one JSON line.

    PYTHONPATH=scripts/bench python -m peers.torch_experts [--part calls|layers] [--tiny]

Calls and shapes are those of measure/kernels/grouped_matmul.py and experts.py. Each call takes turns with one
dense matmul of as many FLOPs. The layer is `torch._grouped_mm` twice, compiled, with bfloat16 matrices and a
router in float32: its rows are gathered, and its results added up by a gather (`gather`) or by index_add
(`scatter`), whichever is faster; both are tried.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import harness

harness.need("torch")

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

CALLS = {"up": (131_072, 2048, 1536, 128), "down": (131_072, 768, 2048, 128)}
"""{name: rows, columns, results, groups}."""
LAYERS = {"qwen3_30b": (32_768, 2048, 768, 128, 8), "wide": (32_768, 4096, 512, 128, 8)}
"""{name: tokens, embed, width, experts, experts of a token}."""
TINY_CALLS, TINY_LAYERS = {"cpu": (128, 32, 16, 4)}, {"cpu": (64, 32, 16, 8, 2)}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def synchronise() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def in_turns(runs: dict, seconds: float, calls: int) -> dict[str, list[float]]:
    """Returns each contender's seconds of a call; they take turns of a few calls."""
    times = {name: [] for name in runs}
    for run in runs.values():
        run()
    synchronise()
    warm = time.perf_counter()
    while time.perf_counter() - warm < seconds / 2:
        for run in runs.values():
            run()
        synchronise()
    while sum(map(sum, times.values())) * calls < seconds * len(runs) or min(map(len, times.values())) < 2:
        for name, run in runs.items():
            began = time.perf_counter()
            for _ in range(calls):
                run()
            synchronise()
            times[name].append((time.perf_counter() - began) / calls)
    return times


def told(times: list[float], flops: float) -> dict:
    seconds = statistics.median(times)
    digits = 4 if flops < 1e9 else 1
    return {"milliseconds": round(1e3 * seconds, 4), "tflops": round(flops / seconds / 1e12, digits)}


def operations(shape: tuple[int, ...], seconds: float) -> dict[str, dict]:
    """Returns what is found of a shape's product, its rows' gradient and its sum, each beside a dense one."""
    rows, columns, results, groups = shape
    draw = np.random.default_rng(0).multinomial(rows, np.full(groups, 1 / groups))
    ends = torch.from_numpy(np.cumsum(draw)).to(DEVICE, torch.int32)
    how = {"device": DEVICE, "dtype": torch.bfloat16}
    x, dy = torch.randn(rows, columns, **how), torch.randn(rows, results, **how)
    w = torch.randn(groups, columns, results, **how)
    pairs = {
        "product": (lambda: torch._grouped_mm(x, w, offs=ends), lambda: x @ w[0]),
        "turned": (lambda: torch._grouped_mm(dy, w.transpose(-2, -1), offs=ends), lambda: dy @ w[0].T),
        "sum": (lambda: torch._grouped_mm(x.T, dy, offs=ends), lambda: x.T @ dy),
    }
    found = {}
    for name, (grouped, dense) in pairs.items():
        runs = {"torch": grouped, "dense": dense}
        try:
            times = in_turns(runs, seconds, calls=10)
        except RuntimeError as error:  # of one call, which must not cost the others' results
            found[name] = {"failed": str(error)[:300]}
            continue
        found[name] = {each: told(of, 2.0 * rows * columns * results) for each, of in times.items()}
    return found


def layer_of(top_k: int, scatters: bool):
    """Returns the layer: (x, router, gate_up, down) -> y."""

    def layer(x, router, gate_up, down):
        tokens = len(x)
        scores = torch.softmax(x.float() @ router, dim=-1)
        weights, ids = torch.topk(scores, top_k, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        flat = ids.reshape(-1)
        order = torch.argsort(flat, stable=True)
        ends = torch.cumsum(torch.bincount(flat, minlength=router.shape[1]), 0).to(torch.int32)
        of_row = order // top_k
        hidden = torch._grouped_mm(x[of_row], gate_up, offs=ends)
        gate, up = hidden.chunk(2, dim=-1)
        active = F.silu(gate.float()) * up.float() * weights.reshape(-1)[order].unsqueeze(-1)
        y = torch._grouped_mm(active.to(x.dtype), down, offs=ends)
        if scatters:
            return torch.zeros(x.shape, dtype=torch.float32, device=x.device).index_add(0, of_row, y.float())
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(len(order), device=x.device)
        return y[inverse].view(tokens, top_k, -1).float().sum(1).to(x.dtype)

    return layer


def layers(shape: tuple[int, ...], seconds: float) -> dict[str, dict]:
    """Returns what is found of a layer, forward and backward, in both of its forms."""
    tokens, embed, width, experts, top_k = shape
    how = {"device": DEVICE, "dtype": torch.bfloat16}
    x, dy = (torch.randn(tokens, embed, **how) for _ in range(2))
    router = (torch.randn(embed, experts, device=DEVICE) * embed**-0.5).requires_grad_()
    gate_up = (torch.randn(experts, embed, 2 * width, **how) * embed**-0.5).requires_grad_()
    down = (torch.randn(experts, width, embed, **how) * width**-0.5).requires_grad_()
    x.requires_grad_()
    given = x, router, gate_up, down
    found, flops = {}, 6.0 * tokens * top_k * embed * width
    for name, scatters in (("gather", False), ("scatter", True)):
        layer = torch.compile(layer_of(top_k, scatters), dynamic=False)

        def both(layer=layer):
            y = layer(*given)
            return torch.autograd.grad(y, given, dy.to(y.dtype))

        def forward(layer=layer):
            with torch.no_grad():
                return layer(*given)

        try:
            times = in_turns({"forward": forward, "both": both}, seconds, calls=3)
        except Exception as error:  # whatever a compiler raises must not cost the other form's result
            found[name] = {"failed": repr(error)[:300]}
            continue
        found[name] = {
            "forward": told(times["forward"], flops),
            "both": told(times["both"], 3 * flops),
        }
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=("calls", "layers"), help="without it, both")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each contender of a turn")
    parser.add_argument("--tiny", action="store_true", help="small shapes, for a CPU")
    parser.add_argument("--output", type=Path, help="also write the JSON to this file")
    arguments = parser.parse_args()
    seconds = 0.01 if arguments.tiny else arguments.seconds
    calls, of_layers = (TINY_CALLS, TINY_LAYERS) if arguments.tiny else (CALLS, LAYERS)
    torch.manual_seed(0)
    line = {"benchmark": "torch_experts"}
    if arguments.part != "layers":
        found = {name: operations(shape, seconds) for name, shape in calls.items()}
        line["calls"] = {f"{name}_{call}": of for name, each in found.items() for call, of in each.items()}
    if arguments.part != "calls":
        line["layers"] = {name: layers(shape, seconds) for name, shape in of_layers.items()}
    line |= {
        "device": torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu",
        "versions": harness.versions("torch"),
        "command": harness.command(),
    }
    harness.emit(line, arguments.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
