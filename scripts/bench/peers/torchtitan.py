"""torchtitan's Llama 3 with what its trainer does on one GPU: prints one JSON line.

    PYTHONPATH=scripts/bench python -m peers.torchtitan [--float8 tensorwise] [--tokens FILE]

Of torchtitan: the model, its compiling block by block, its compiled loss; its one-GPU mixed precision is
autocast over float32 weights. Written for torchtitan 0.2.2, which goes with torch 2.11. Its Llama has no tied
embeddings: for a shape that has, they are tied here as its Qwen3 ties them, both modules having one weight.
"""

import sys

import harness

harness.need("torch", "torchtitan")

import torch  # noqa: E402
from peers import torch_step  # noqa: E402
from torchtitan.components.loss import cross_entropy_loss  # noqa: E402
from torchtitan.config.job_config import Compile  # noqa: E402
from torchtitan.models.llama3.infra.parallelize import apply_compile  # noqa: E402
from torchtitan.models.llama3.model.args import TransformerModelArgs  # noqa: E402
from torchtitan.models.llama3.model.model import Transformer  # noqa: E402


def build(arguments) -> Transformer:
    """Returns the model in float32, its weights initialised, without activation checkpointing."""
    shape = harness.Shape.of(arguments)
    shape.need_none_of("qk_norm", peer="torchtitan.py")
    sizes = TransformerModelArgs(
        dim=shape.embed,
        n_layers=shape.layers,
        n_heads=shape.heads,
        n_kv_heads=shape.kv_heads,
        vocab_size=shape.vocabulary,
        multiple_of=shape.mlp,  # 8/3 of dim, rounded up to a multiple of this, is the width of the MLP
        rope_theta=shape.rope_theta,
        max_seq_len=8192,
    )
    with torch_step.device(), torch.no_grad():
        model = Transformer(sizes)
        model.init_weights()
        if shape.tied_embeddings:
            model.tok_embeddings.weight = model.output.weight
    return model.train()


def main() -> int:
    arguments = torch_step.parser(__doc__.splitlines()[0], compile_by="blocks").parse_args()
    torch.manual_seed(0)
    model = build(arguments)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    torch_step.round_embedding(model.tok_embeddings, arguments.residual)
    torch_step.use_float8(model.layers, arguments.float8)
    loss_sum = cross_entropy_loss
    if arguments.compile == "blocks":
        apply_compile(model, Compile(enable=True))
        loss_sum = torch.compile(cross_entropy_loss)

    def loss_of(tokens, targets):
        return loss_sum(model(tokens), targets) / (targets != -100).sum()

    if arguments.compile == "whole":
        loss_of = torch.compile(loss_of, mode=arguments.mode)
    packages = ("torchtitan", *(["torchao"] if arguments.float8 != "none" else []))
    line = torch_step.measure(loss_of, model, arguments, **harness.versions(*packages))
    assert line["parameters"] == parameters, "compiling must not hide parameters"
    harness.emit(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
