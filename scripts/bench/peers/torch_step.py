"""One training step in PyTorch as the peers share it: autocast, clipping, finite check, fused AdamW.

Master weights and moments are float32, computation is bfloat16 by autocast: what both peers do on one GPU.
Where PyTorch leaves a choice, the faster one is taken:
- the embedding's output is cast to bfloat16, so that the residual stream is (--residual float32: theirs);
- clipping and the skipped update for a non-finite loss or gradient go through fused AdamW's own `grad_scale`
  and `found_inf`, which cost neither a pass over the gradients nor a wait for the GPU.
"""

import argparse
import contextlib
import dataclasses
import importlib.util
import itertools
from collections.abc import Iterator

import harness
import numpy as np
import timed_loop

harness.need("torch")

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "math": SDPBackend.MATH,
}
"""What --attention names of PyTorch's implementations."""


def parser(description: str, compile_by: str) -> argparse.ArgumentParser:
    """Returns the arguments of a PyTorch peer. compile_by: how its own users compile it."""
    parser = harness.peer_parser(description)
    add = parser.add_argument
    add("--compile", choices=("whole", "blocks", "none"), default=compile_by)
    add("--mode", default="default", help="of torch.compile: default or max-autotune-no-cudagraphs")
    add("--residual", choices=("bfloat16", "float32"), default="bfloat16")
    add("--attention", choices=("cudnn", "flash", "math"), default="cudnn")
    recipes = ("none", "tensorwise", "rowwise", "rowwise_with_gw_hp")
    add("--float8", choices=recipes, default="none", help="a torchao recipe for the blocks' linear layers")
    return parser


def device() -> torch.device:
    """Returns the GPU, or the CPU of a machine that has none."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def use_float8(blocks: nn.Module, recipe: str) -> None:
    """Replaces the linear layers of the blocks (not the output layer) by torchao's float8 ones, in place."""
    if recipe == "none":
        return
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(recipe)
    if device().type == "cpu":
        config = dataclasses.replace(config, emulate=True)
    convert_to_float8_training(blocks, config=config)


def round_embedding(embedding: nn.Module, residual: str) -> None:
    """Makes the embedding's output, and so the residual stream, bfloat16."""
    if residual == "bfloat16":
        embedding.register_forward_hook(lambda _module, _inputs, output: output.to(torch.bfloat16))


def adamw(parameters: list[torch.Tensor]) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        parameters,
        lr=harness.LEARNING_RATE,
        betas=harness.BETAS,
        eps=harness.EPSILON,
        weight_decay=harness.WEIGHT_DECAY,
        fused=True,
    )


def measure(
    loss_of, model: nn.Module, arguments: argparse.Namespace, packed: "Packed | None" = None, **packages: str
) -> dict:
    """Returns the line of a peer. loss_of: (tokens, targets, **more) -> mean loss, with -100 for masked
    targets. packed: batches in place of the causal rows that the arguments name, with what `more` is."""
    where, parameters = device(), [each for each in model.parameters() if each.requires_grad]
    optimizer = adamw(parameters)
    cycle = len(packed.batches) if packed else 1  # causal rows cost the same
    if packed is None:
        rows = harness.rows_of(arguments)
        packed = Packed([(*batch, {}) for batch in _causal(rows)], rows.shape[2], rows[0].size)
    batches = itertools.cycle(packed.batches)
    skipped = torch.zeros((), device=where)

    def dispatch():
        with torch.autocast(where.type, torch.bfloat16):
            tokens, targets, more = next(batches)
            loss = loss_of(tokens, targets, **more)
        loss.backward()
        norm = nn.utils.get_total_norm([parameter.grad for parameter in parameters], foreach=True)
        missed = (~(norm.isfinite() & loss.isfinite())).float()
        skipped.add_(missed)
        optimizer.grad_scale = (norm / harness.MAX_NORM).clamp(min=1.0)
        optimizer.found_inf = missed
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        # Copied without waiting, so that the next step can be queued before this one is read.
        values = torch.stack([loss.detach(), norm, skipped]).to("cpu", non_blocking=True)
        done = torch.cuda.Event() if where.type == "cuda" else None
        if done:
            done.record()
        return done, values

    def finish(started):
        done, values = started
        if done:
            done.synchronize()
        return values.tolist()

    with attention_by(arguments.attention if where.type == "cuda" else "math"):
        timing = timed_loop.timed(
            dispatch, finish, arguments.warmup_seconds, arguments.timed_seconds, cycle=cycle
        )
    settings = ("compile", "mode", "residual", "attention", "masks", "float8", "checkpoint", "documents")
    settings = {name: getattr(arguments, name) for name in settings if hasattr(arguments, name)}
    return result(timing, packed.tokens, packed.span, parameters, settings, **packages)


@dataclasses.dataclass(frozen=True)
class Packed:
    """batches: (tokens, targets, more) each, on the device beforehand: loading costs the peers nothing. span:
    mean length of the document that a token is in. tokens: of a batch in the mean, padding left out."""

    batches: list[tuple[torch.Tensor, torch.Tensor, dict]]
    span: float
    tokens: float


def on_device(tokens: np.ndarray, targets: np.ndarray, mask: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns tokens and targets of a batch on the device, -100 for masked targets."""
    masked = torch.from_numpy(targets).long().masked_fill(torch.from_numpy(mask) == 0, -100)
    return torch.from_numpy(tokens).long().to(device()), masked.to(device())


def _causal(rows: np.ndarray) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [on_device(*batch) for batch in itertools.islice(harness.causal_batches(rows), len(rows))]


def causal_batches(rows: np.ndarray) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields (tokens, targets) for ever, see `Packed`. rows: int32 [batches, rows, sequence]."""
    return itertools.cycle(_causal(rows))


def result(
    timing: timed_loop.Timing, tokens: int, span: float, parameters: list, settings: dict, **packages: str
) -> dict:
    """Returns the line of a peer whose steps return (loss, gradient norm, skipped updates). tokens: of a
    step. span: of `Packed`."""
    on_gpu = device().type == "cuda"
    return {
        **timing.line(tokens),
        "attention_span_per_token": span,
        "loss": [timing.values[0][0], timing.values[-1][0]],
        "skipped_updates": int(timing.values[-1][2]),
        "peak_hbm_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
        "settings": settings,
        "parameters": sum(parameter.numel() for parameter in parameters),
        "device": {"kind": torch.cuda.get_device_name() if on_gpu else "cpu", "count": 1},
        "versions": {"torch": torch.__version__, **_triton(), **packages},
    }


def _triton() -> dict[str, str]:
    return harness.versions("triton") if importlib.util.find_spec("triton") else {}


def attention_by(name: str) -> contextlib.AbstractContextManager:
    """Pins scaled_dot_product_attention to one implementation."""
    return sdpa_kernel([BACKENDS[name]])
