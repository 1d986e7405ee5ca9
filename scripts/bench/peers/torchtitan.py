"""torchtitan's Llama 3, compiled as torchtitan does, in the step that peers share: prints one JSON line.

    PYTHONPATH=scripts/bench python -m peers.torchtitan [--float8 tensorwise] [--tokens FILE]

Of torchtitan 0.3.0: the model, its compiling block by block, its compiled loss. Its trainer's defaults are
for packed rows and many GPUs; this takes what should be the fastest for whole rows on one GPU:
- attention by its module over PyTorch's `scaled_dot_product_attention`, which needs no mask. Its trainer
  gives language models FlexAttention and a mask of documents;
- mixed precision by autocast over float32 weights, as of 0.2.2. Its trainer now shards over the one GPU for
  that, which copies the weights more often;
- the loss of whole logits. Its trainer's Llamas take them in 8 chunks, which saves memory and adds up the
  gradient of the output layer 8 times;
- no activation checkpointing, and no CUDA graph of a step: steps are queued ahead of the GPU.
"""

import sys

import harness

harness.need("torch", "torchtitan")

import torch  # noqa: E402
import torch.distributed.fsdp  # noqa: E402
from peers import torch_step  # noqa: E402

if not hasattr(torch.distributed.fsdp, "DataParallelMeshDims"):
    # torch 2.11 lacks this name, which torchtitan imports for its sharding and which nothing here uses.
    torch.distributed.fsdp.DataParallelMeshDims = object

from torchtitan.components.loss import CrossEntropyLoss  # noqa: E402
from torchtitan.config import CompileConfig, ParallelismConfig  # noqa: E402
from torchtitan.distributed import ParallelDims  # noqa: E402
from torchtitan.distributed.compile import apply_compile  # noqa: E402
from torchtitan.models import llama3  # noqa: E402
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config  # noqa: E402
from torchtitan.models.llama3.model import Llama3Model, Llama3TransformerBlock  # noqa: E402


def norm(shape: harness.Shape) -> RMSNorm.Config:
    return RMSNorm.Config(normalized_shape=shape.embed, eps=shape.norm_epsilon, param_init=llama3._NORM_INIT)


def block(shape: harness.Shape, number: int) -> Llama3TransformerBlock.Config:
    """Returns a block as torchtitan's own shapes of Llama 3 have it, but for its attention, the epsilon of
    norms and RoPE's 8,192 positions."""
    attention = make_gqa_config(
        dim=shape.embed,
        n_heads=shape.heads,
        n_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        wqkv_param_init=llama3._LINEAR_INIT,
        wo_param_init=llama3._depth_init(number),
        inner_attention=ScaledDotProductAttention.Config(),
        fuse_qkv=True,
        rope=ComplexRoPE.Config(
            dim=shape.head_dim, max_seq_len=8192, theta=shape.rope_theta, scaling="llama"
        ),
    )
    feed_forward = make_ffn_config(
        dim=shape.embed,
        hidden_dim=shape.mlp,
        w1_param_init=llama3._LINEAR_INIT,
        w2w3_param_init=llama3._depth_init(number),
    )
    return Llama3TransformerBlock.Config(
        attention=attention, feed_forward=feed_forward, attention_norm=norm(shape), ffn_norm=norm(shape)
    )


def build(arguments) -> Llama3Model:
    """Returns the model in float32, its weights initialised, without activation checkpointing."""
    shape = harness.Shape.of(arguments)
    shape.need_none_of("qk_norm", peer="torchtitan.py")
    tied = bool(shape.tied_embeddings)
    sizes = Llama3Model.Config(
        dim=shape.embed,
        vocab_size=shape.vocabulary,
        enable_weight_tying=tied,
        tok_embeddings=Embedding.Config(
            num_embeddings=shape.vocabulary,
            embedding_dim=shape.embed,
            param_init=llama3._EMBEDDING_SKIP_INIT if tied else llama3._EMBEDDING_INIT,
        ),
        norm=norm(shape),
        lm_head=Linear.Config(
            in_features=shape.embed,
            out_features=shape.vocabulary,
            param_init=llama3._output_linear_init(shape.embed),
        ),
        layers=[block(shape, number) for number in range(shape.layers)],
    )
    if torch_step.device().type == "cuda":
        # Its attention pins PyTorch's by itself: what torch_step pins around it would not count.
        ScaledDotProductAttention.sdpa_backends = [torch_step.BACKENDS[arguments.attention]]
    with torch_step.device(), torch.no_grad():
        model = sizes.build()
        model.init_weights()
    return model.train()


def main() -> int:
    arguments = torch_step.parser(__doc__.splitlines()[0], compile_by="blocks").parse_args()
    torch.manual_seed(0)
    model = build(arguments)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    torch_step.round_embedding(model.tok_embeddings, arguments.residual)
    torch_step.use_float8(model.layers, arguments.float8)
    compiling = CompileConfig(enable=arguments.compile == "blocks")
    if compiling.enable:
        one_gpu = ParallelDims.from_config(ParallelismConfig(), world_size=1)
        apply_compile(model, compile_config=compiling, parallel_dims=one_gpu)
    mean_loss = CrossEntropyLoss.Config().build(compile_config=compiling)

    def loss_of(tokens, targets):
        loss, _metrics = mean_loss(model(tokens), targets, (targets != -100).sum())
        return loss

    if arguments.compile == "whole":
        loss_of = torch.compile(loss_of, mode=arguments.mode)
    packages = ("torchtitan", *(["torchao"] if arguments.float8 != "none" else []))
    line = torch_step.measure(loss_of, model, arguments, **harness.versions(*packages))
    assert line["parameters"] == parameters, "compiling must not hide parameters"
    harness.emit(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
