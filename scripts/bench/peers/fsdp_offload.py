"""Hugging Face's Llama under torch FSDP2 with CPUOffloadPolicy and fused CPU AdamW: prints one JSON line.

    PYTHONPATH=scripts/bench python -m peers.fsdp_offload [--rows 8] [--tokens FILE]

Parameters, gradients and moments are float32 in pinned host memory; a layer is copied to the GPU ahead of its
use and rounded to bfloat16 there. With several micro-batches gradients add up on the GPU in float32, and go
to the host after the last one.
"""

import sys

import harness

harness.need("torch", "transformers")

import torch  # noqa: E402
from peers import torch_offload, torch_step  # noqa: E402
from torch import distributed, nn  # noqa: E402
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard  # noqa: E402


def sharded(model: torch_offload.MeanLoss, reshard: bool) -> torch_offload.MeanLoss:
    """Returns the model with its state on the host. reshard: free a layer's copy after the forward."""
    where = torch_step.device()
    settings = {
        "mesh": distributed.init_device_mesh(where.type, (1,)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        "offload_policy": CPUOffloadPolicy(pin_memory=where.type == "cuda"),
    }
    for layer in model.layers:
        fully_shard(layer, reshard_after_forward=reshard, **settings)
    return fully_shard(model, **settings)


def main() -> int:
    parser = torch_offload.parser(__doc__.splitlines()[0])
    parser.add_argument("--keep-gathered", action="store_true", help="free no layer after its forward")
    arguments = parser.parse_args()
    harness.keep_stdout()
    torch.manual_seed(0)
    torch_offload.one_process()
    model = sharded(torch_offload.MeanLoss(arguments), not arguments.keep_gathered)
    parameters = list(model.parameters())
    # The same memory as plain tensors: with one process there is nothing to gather, and a step costs no
    # dispatch of distributed tensors.
    local = [parameter.to_local().detach().requires_grad_() for parameter in parameters]
    optimizer = torch_step.adamw(local)
    skipped = 0.0

    def update(parts):
        nonlocal skipped
        total = 0.0
        for number, (tokens, targets) in enumerate(parts):
            model.set_requires_gradient_sync(number == len(parts) - 1)
            loss = model(tokens, targets) / len(parts)
            loss.backward()
            total = total + loss.detach()
        total = total.cpu()  # waits for the GPU; the last backward has waited for the copies
        for tensor, parameter in zip(local, parameters, strict=True):
            tensor.grad = parameter.grad.to_local()
        norm = nn.utils.get_total_norm([tensor.grad for tensor in local])
        missed = (~(norm.isfinite() & total.isfinite())).float()
        skipped += float(missed)
        optimizer.grad_scale = (norm / harness.MAX_NORM).clamp(min=1.0)  # clips without another pass
        optimizer.found_inf = missed
        optimizer.step()
        for tensor, parameter in zip(local, parameters, strict=True):
            tensor.grad = parameter.grad = None
        return float(total), float(norm), skipped

    settings = {"optimizer": "torch AdamW, fused, on the CPU", "keep_gathered": arguments.keep_gathered}
    line = torch_offload.measure(update, model, arguments, settings)
    distributed.destroy_process_group()
    harness.emit(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
