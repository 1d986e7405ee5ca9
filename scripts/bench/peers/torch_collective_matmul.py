"""Times PyTorch's fused all-gather + matmul and matmul + reduce-scatter on symmetric memory, and NCCL's.

    TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NCCL_NVLS_ENABLE=0 python torch_collective_matmul.py --shapes JSON

JSON: {name: {"operation": "all_gather_matmul", "rows": 8192, "contracted": 4096, "columns": [6144]}}. Prints
one line of it: {name: {"apart", regime: {"fused" and "nccl": {"microseconds", ...}}}}, or {"missing": why}.
Regimes are those of collective_matmul.py: `contenders`, without a pause, `in_bursts`, and `at_the_cap`, with
watts of a GPU and joules of a call on all. One process for each GPU, as PyTorch has it. It refuses to begin
unless PyTorch itself says that symmetric memory makes no multicast object, for such an object may not exist
on every machine.
"""

import argparse
import importlib.util
import json
import os
import socket
import statistics
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))
from gpu_joules import Energy

REGIMES = {"contenders": (0.02, 0.0, 12), "in_bursts": (0.02, 0.06, 8), "at_the_cap": (0.4, 0.0, 3)}
"""{regime: seconds of a turn, of the rest before it, and turns}; two more come before them."""


def run(rank: int, devices: int, shapes: dict, port: int, results) -> None:
    import torch
    import torch.distributed as dist
    from torch._C._autograd import DeviceType
    from torch._C._distributed_c10d import _SymmetricMemory
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.cuda.set_device(rank)
    if _SymmetricMemory.has_multicast_support(DeviceType.CUDA, rank):
        if rank == 0:
            results.put({"missing": "symmetric memory would use multicast"})
        return
    dist.init_process_group("nccl", rank=rank, world_size=devices, device_id=torch.device("cuda", rank))
    group = dist.group.WORLD.group_name
    enable_symm_mem_for_group(group)
    found = {}
    for name, shape in shapes.items():
        generator = torch.Generator("cuda").manual_seed(rank)

        def normal(*size, generator=generator):
            return torch.randn(size, generator=generator, device="cuda", dtype=torch.bfloat16)

        if shape["operation"] == "all_gather_matmul":
            x = normal(shape["rows"] // devices, shape["contracted"])
            weights = [normal(shape["contracted"], n // devices) for n in shape["columns"]]
            whole = x.new_empty(shape["rows"], shape["contracted"])

            def fused(x=x, weights=weights):
                return torch.ops.symm_mem.fused_all_gather_matmul(x, weights, 0, group)[1]

            def plain(x=x, weights=weights, whole=whole):
                dist.all_gather_into_tensor(whole, x)
                return [whole @ w for w in weights]
        else:
            y = normal(shape["rows"], shape["contracted"] // devices)
            w = normal(shape["contracted"] // devices, shape["columns"][0])
            part = y.new_empty(shape["rows"] // devices, shape["columns"][0])

            def fused(y=y, w=w):
                return [torch.ops.symm_mem.fused_matmul_reduce_scatter(y, w, "sum", 0, group)]

            def plain(y=y, w=w, part=part):
                dist.reduce_scatter_tensor(part, y @ w)
                return [part]

        pairs = zip(fused(), plain(), strict=True)
        apart = max(float((a.float() - b.float()).norm() / b.float().norm()) for a, b in pairs)

        def took(call, count, rest=0.0):
            dist.barrier()
            torch.cuda.synchronize()
            time.sleep(rest)
            began = time.perf_counter()
            for _ in range(count):
                call()
            torch.cuda.synchronize()
            return (time.perf_counter() - began) / count

        calls = {"fused": fused, "nccl": plain}
        once = torch.tensor([min(took(call, 10) for _ in range(3)) for call in calls.values()], device="cuda")
        dist.broadcast(once, 0)  # so that all processes make as many calls
        found[name] = {"apart": apart}
        for regime, (seconds, rest, turns) in REGIMES.items():
            times, watts = ({kind: [] for kind in calls} for _ in range(2))
            for turn in range(turns + 2):
                for (kind, call), each in zip(calls.items(), once.tolist(), strict=True):
                    if regime == "at_the_cap":
                        took(call, max(1, round(0.15 / each)))  # until the clock is its own
                    with Energy(devices if rank == 0 and regime == "at_the_cap" else 0) as used:
                        mean = took(call, max(1, round(seconds / each)), rest)
                    if turn >= 2:
                        times[kind].append(mean)
                        watts[kind].append(used.watts)
            found[name][regime] = {kind: told(times[kind], watts[kind], devices) for kind in calls}
    if rank == 0:
        device = {"kind": torch.cuda.get_device_name(0), "count": devices}
        results.put(found | {"device": device, "versions": {"torch": torch.__version__}})
    dist.destroy_process_group()


def told(times: list[float], watts: list[float | None], devices: int) -> dict:
    """Returns what the record says of one way of computing."""
    seconds, known = statistics.median(times), [each for each in watts if each]
    halves = [statistics.median(times[start::2]) for start in (0, 1)]
    line = {"microseconds": round(1e6 * seconds, 1)}
    line["a_a_spread"] = round(abs(halves[0] - halves[1]) / seconds, 5)
    if known:
        line["watts"] = round(statistics.fmean(known), 1)
        line["joules"] = round(statistics.fmean(known) * seconds * devices, 5)
    return line


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--shapes", type=json.loads, required=True)
    options = parser.parse_args()
    missing = None
    if importlib.util.find_spec("torch") is None:
        missing = "torch is not installed"
    elif (
        os.environ.get("TORCH_SYMM_MEM_DISABLE_MULTICAST") != "1" or os.environ.get("NCCL_NVLS_ENABLE") != "0"
    ):
        missing = "TORCH_SYMM_MEM_DISABLE_MULTICAST is not 1, or NCCL_NVLS_ENABLE not 0"
    if missing:
        print(json.dumps({"missing": missing}))
        return 0
    import torch.multiprocessing as processes

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    results = processes.get_context("spawn").SimpleQueue()
    processes.spawn(run, (options.devices, options.shapes, port, results), nprocs=options.devices)
    print(json.dumps(results.get()), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
