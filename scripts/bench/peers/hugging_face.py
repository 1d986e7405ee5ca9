"""Hugging Face's Llama or Qwen3 with torch.compile, cuDNN attention and fused AdamW: prints one JSON line.

PYTHONPATH=scripts/bench python -m peers.hugging_face [--float8 tensorwise] [--tokens FILE]
"""

import argparse
import sys
from collections.abc import Callable

import harness

harness.need("torch", "transformers")

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from peers import torch_step  # noqa: E402
from torch import nn  # noqa: E402
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM  # noqa: E402
from transformers.integrations.sdpa_attention import sdpa_attention_forward  # noqa: E402

# Under torch.compile the model cannot see that no row is packed, and builds a whole [rows, T, T] mask, with
# which attention is neither causal by kernel nor grouped. An attention without an entry for masks is given
# none.
AttentionInterface.register("causal_sdpa", sdpa_attention_forward)


def build(arguments: argparse.Namespace, attention: str = "causal_sdpa") -> nn.Module:
    """Returns the model in float32, in training mode, without gradient checkpointing: Qwen3's class for a
    shape with norms of queries and keys, Llama's for others.

    arguments: the shape's, and `masks`. attention: by a name that transformers knows. Stretched rotary
    positions, which cost nothing to train with, are left out.
    """
    shape = harness.Shape.of(arguments)
    kinds = (Qwen3Config, Qwen3ForCausalLM) if shape.qk_norm else (LlamaConfig, LlamaForCausalLM)
    config = kinds[0](
        hidden_size=shape.embed,
        intermediate_size=shape.mlp,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocabulary,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        rms_norm_eps=shape.norm_epsilon,
        tie_word_embeddings=bool(shape.tied_embeddings),
        use_cache=False,
        attn_implementation="sdpa" if arguments.masks == "whole" else attention,
        dtype=torch.float32,
    )
    with torch_step.device():
        return kinds[1](config).train()


def prepared(arguments: argparse.Namespace, attention: str = "causal_sdpa") -> tuple[nn.Module, Callable]:
    """Returns the model, and (tokens, targets, **of its attention) -> mean loss, compiled as asked for."""
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    model = build(arguments, attention)
    torch_step.round_embedding(model.model.embed_tokens, arguments.residual)
    torch_step.use_float8(model.model.layers, arguments.float8)
    if arguments.checkpoint == "full":
        model.gradient_checkpointing_enable({"use_reentrant": False})

    def head_loss(hidden, targets):
        logits = model.lm_head(hidden)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=-100)

    if arguments.compile == "blocks":
        for layer in model.model.layers:
            layer.compile(mode=arguments.mode)
        head_loss = torch.compile(head_loss, mode=arguments.mode)

    def loss_of(tokens, targets, **more):
        return head_loss(model.model(input_ids=tokens, **more).last_hidden_state, targets)

    if arguments.compile == "whole":
        loss_of = torch.compile(loss_of, mode=arguments.mode)
    return model, loss_of


def parser(description: str) -> argparse.ArgumentParser:
    """Returns the arguments of a peer that trains one of these models."""
    parser = torch_step.parser(description, compile_by="whole")
    parser.add_argument("--masks", choices=("none", "whole"), default="none", help="whole: as the model does")
    parser.add_argument("--checkpoint", choices=("none", "full"), default="none", help="full: of each layer")
    return parser


def packages(arguments: argparse.Namespace) -> dict[str, str]:
    """Returns the versions of what such a peer runs beside PyTorch."""
    return harness.versions("transformers", *(["torchao"] if arguments.float8 != "none" else []))


def main() -> int:
    arguments = parser(__doc__.splitlines()[0]).parse_args()
    model, loss_of = prepared(arguments)
    harness.emit(torch_step.measure(loss_of, model, arguments, **packages(arguments)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
