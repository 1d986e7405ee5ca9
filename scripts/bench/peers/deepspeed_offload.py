"""Hugging Face's Llama under DeepSpeed ZeRO-2 with its optimizer on the CPU: prints one JSON line.

    PYTHONPATH=scripts/bench python -m peers.deepspeed_offload [--rows 8] [--tokens FILE]

Weights are bfloat16 on the GPU; master weights and moments are float32 in pinned host memory, where
DeepSpeedCPUAdam updates them. It is compiled at the first start on a machine, which takes a minute. DeepSpeed
clips to the global norm and skips an update that is not finite (its defaults).
"""

import os
import shutil
import socket
import sys
from pathlib import Path

import harness

harness.need("torch", "transformers", "deepspeed", "hjson", "pydantic", "pydantic_core", "cpuinfo", "ninja")


def find_cuda() -> None:
    """Sets CUDA_HOME, which DeepSpeed asks for, to where the compiler is; left alone if there is none."""
    if "CUDA_HOME" in os.environ:
        return
    usual = [Path(shutil.which("nvcc") or ""), *sorted(Path("/usr/local").glob("cuda*/bin/nvcc"))]
    packaged = (Path(folder) / "nvidia" for folder in sys.path)
    usual += [nvcc for folder in packaged for nvcc in sorted(folder.glob("*/bin/nvcc"))]
    found = next((nvcc for nvcc in usual if nvcc.is_file()), None)
    if found:
        os.environ["CUDA_HOME"] = str(found.resolve().parent.parent)
    # Only the C++ compiler makes CPUAdam: a toolkit of another minor version than PyTorch's does no harm.
    os.environ.setdefault("DS_SKIP_CUDA_CHECK", "1")


find_cuda()

import deepspeed  # noqa: E402
import torch  # noqa: E402
from peers import torch_offload, torch_step  # noqa: E402
from torch import distributed  # noqa: E402


def settings_of(arguments, parts: int) -> dict:
    """Returns DeepSpeed's configuration. parts: micro-batches of a step."""
    adam = {
        "lr": harness.LEARNING_RATE,
        "betas": list(harness.BETAS),
        "eps": harness.EPSILON,
        "weight_decay": harness.WEIGHT_DECAY,
    }
    return {
        "train_micro_batch_size_per_gpu": arguments.micro_rows,
        "gradient_accumulation_steps": parts,
        "bf16": {"enabled": True},
        "gradient_clipping": harness.MAX_NORM,
        "optimizer": {"type": "AdamW", "params": adam},
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {"device": "cpu", "pin_memory": torch_step.device().type == "cuda"},
            "overlap_comm": True,
            "contiguous_gradients": True,
        },
        "steps_per_print": 1_000_000_000,
    }


def main() -> int:
    arguments = torch_offload.parser(__doc__.splitlines()[0]).parse_args()
    harness.keep_stdout()
    torch.manual_seed(0)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    rows = harness.rows_of(arguments).shape[1]
    model = torch_offload.MeanLoss(arguments)
    for parameter in model.parameters():  # not the buffers, whose angles need float32
        parameter.data = parameter.data.to(torch.bfloat16)
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=list(model.parameters()),
        config=settings_of(arguments, rows // arguments.micro_rows),
    )

    def update(parts):
        losses = []
        for tokens, targets in parts:
            loss = engine(tokens, targets)
            engine.backward(loss)  # divides by the number of micro-batches
            engine.step()  # updates after the last one
            losses.append(loss.detach())
        return float(torch.stack(losses).mean()), float(engine.get_global_grad_norm()), engine.skipped_steps

    settings = {"zero_stage": 2, "optimizer": type(engine.optimizer.optimizer).__name__}
    versions = harness.versions("deepspeed")
    line = torch_offload.measure(update, model, arguments, settings, **versions)
    distributed.destroy_process_group()
    harness.emit(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
