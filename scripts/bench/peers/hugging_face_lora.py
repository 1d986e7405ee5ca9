"""Hugging Face's Llama with PEFT's LoRA and torch.compile, base in bfloat16: prints one JSON line.

    PYTHONPATH=scripts/bench python -m peers.hugging_face_lora [--rank 16] [--tokens FILE]

At its best, as it stands: cuDNN's causal attention without masks, adapters multiplied in bfloat16 by autocast
(their masters are float32), the loss compiled with the LM head. As PEFT's guide has it: `--masks whole`.
"""

import argparse
import sys
from collections.abc import Callable

import harness

harness.need("torch", "transformers", "peft")

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from peers import hugging_face, torch_step  # noqa: E402
from peft import LoraConfig, get_peft_model  # noqa: E402
from torch import nn  # noqa: E402

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def prepared(arguments: argparse.Namespace) -> tuple[nn.Module, Callable]:
    """Returns the model, and (tokens, targets) -> mean loss, compiled as asked for."""
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    base = hugging_face.build(arguments).to(torch.bfloat16)
    adapters = LoraConfig(
        r=arguments.rank,
        lora_alpha=2 * arguments.rank,
        target_modules=TARGETS,
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(base, adapters).train()  # casts adapters to float32
    inner, head = base.model, base.lm_head
    if arguments.checkpoint == "full":
        base.enable_input_require_grads()
        base.gradient_checkpointing_enable({"use_reentrant": False})

    def head_loss(hidden, targets):
        return F.cross_entropy(head(hidden).float().flatten(0, 1), targets.flatten(), ignore_index=-100)

    if arguments.compile == "blocks":
        for layer in inner.layers:
            layer.compile(mode=arguments.mode)
        head_loss = torch.compile(head_loss, mode=arguments.mode)

    def loss_of(tokens, targets):
        return head_loss(inner(input_ids=tokens).last_hidden_state, targets)

    if arguments.compile == "whole":
        loss_of = torch.compile(loss_of, mode=arguments.mode)
    return model, loss_of


def parser(description: str) -> argparse.ArgumentParser:
    """Returns the arguments of this peer."""
    found = hugging_face.parser(description)
    found.add_argument("--rank", type=int, default=16)
    return found


def main() -> int:
    arguments = parser(__doc__.splitlines()[0]).parse_args()
    model, loss_of = prepared(arguments)
    versions = hugging_face.packages(arguments) | harness.versions("peft")
    harness.emit(torch_step.measure(loss_of, model, arguments, **versions))
    return 0


if __name__ == "__main__":
    sys.exit(main())
