"""What the PyTorch peers that keep state in host memory share: the model, its loss and the micro-batches.

Hugging Face's Llama with its loss, in micro-batches, the layers recomputed in the backward pass.

Where PyTorch leaves a choice, the faster one is taken: layers and loss are compiled (the loss then takes all
logits of a micro-batch at once), attention is cuDNN's causal kernel, and the masks are left out.
"""

import argparse

import harness
import timed_loop

harness.need("torch", "transformers")

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from peers import hugging_face, torch_step  # noqa: E402
from torch import distributed, nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

CHUNKS = 8  # of the loss, if it is not compiled


def parser(description: str) -> argparse.ArgumentParser:
    """Returns the arguments of such a peer."""
    parser = harness.peer_parser(description)
    add = parser.add_argument
    add("--micro-rows", type=int, default=2, help="rows of a micro-batch")
    add("--compile", choices=("blocks", "none"), default="blocks")
    add("--remat", choices=("full", "none"), default="full", help="full: keep each layer's input alone")
    add("--attention", choices=("cudnn", "flash", "math"), default="cudnn")
    parser.set_defaults(masks="none")
    return parser


class MeanLoss(nn.Module):
    """(tokens, targets) -> mean cross-entropy of a micro-batch, with -100 for masked targets."""

    def __init__(self, arguments: argparse.Namespace):
        super().__init__()
        self.model = hugging_face.build(arguments)
        self.layers = self.model.model.layers  # the same ones, for a peer to wrap
        self.loss = _in_chunks
        if arguments.remat == "full":
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        if arguments.compile == "blocks":
            self.loss = torch.compile(_cross_entropy)
            for layer in self.layers:
                layer.compile()

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        hidden = self.model.model(input_ids=tokens).last_hidden_state
        total = self.loss(hidden.flatten(0, 1), self.model.lm_head.weight, targets.flatten())
        return total / (targets != -100).sum()


def _cross_entropy(hidden, output, targets):
    """Returns the sum of the losses; logits in the dtype of `hidden`, their softmax in float32."""
    logits = F.linear(hidden, output.to(hidden.dtype)).float()
    return F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")


def _in_chunks(hidden, output, targets):
    parts = zip(hidden.chunk(CHUNKS), targets.chunk(CHUNKS), strict=True)
    return sum(checkpoint(_cross_entropy, part, output, of, use_reentrant=False) for part, of in parts)


def micro_batches(tokens: torch.Tensor, targets: torch.Tensor, rows: int) -> list:
    """Returns a batch in parts of this many rows."""
    return list(zip(tokens.split(rows), targets.split(rows), strict=True))


def one_process() -> None:
    """Starts torch.distributed with this process alone."""
    backend = "nccl" if torch_step.device().type == "cuda" else "gloo"
    distributed.init_process_group(backend, store=distributed.HashStore(), rank=0, world_size=1)


def measure(update, model: MeanLoss, arguments: argparse.Namespace, settings: dict, **packages) -> dict:
    """Returns the line of a peer. update: (micro-batches) -> (loss, gradient norm, skipped updates), once
    the update is made: it is the host that makes it, so that no step can be queued behind it."""
    rows = harness.rows_of(arguments)
    batches = torch_step.causal_batches(rows)
    if torch_step.device().type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()  # of training, not of building the model
    on_gpu = torch_step.device().type == "cuda"

    def dispatch():
        return update(micro_batches(*next(batches), arguments.micro_rows))

    with torch_step.attention_by(arguments.attention if on_gpu else "math"):
        seconds = (arguments.warmup_seconds, arguments.timed_seconds)
        timing = timed_loop.timed(dispatch, list, *seconds)
    settings |= {name: getattr(arguments, name) for name in ("compile", "remat", "attention", "micro_rows")}
    settings["threads"] = torch.get_num_threads()
    packages |= harness.versions("transformers")
    size, span = rows[0].size, rows.shape[2]
    return torch_step.result(timing, size, span, list(model.parameters()), settings, **packages)
