"""Hugging Face's Llama with torch.compile, cuDNN attention and fused AdamW: prints one JSON line.

PYTHONPATH=scripts/bench python -m peers.hugging_face [--float8 tensorwise] [--tokens FILE]
"""

import sys

import harness

harness.need("torch", "transformers")

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from peers import torch_step  # noqa: E402
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM  # noqa: E402
from transformers.integrations.sdpa_attention import sdpa_attention_forward  # noqa: E402

# Under torch.compile the model cannot see that no row is packed, and builds a whole [rows, T, T] mask, with
# which attention is neither causal by kernel nor grouped. An attention without an entry for masks is given
# none.
AttentionInterface.register("causal_sdpa", sdpa_attention_forward)


def build(arguments) -> LlamaForCausalLM:
    """Returns the model in float32, in training mode, without gradient checkpointing.

    arguments: the shape's, and `masks`.
    """
    shape = harness.Shape.of(arguments)
    config = LlamaConfig(
        hidden_size=shape.embed,
        intermediate_size=shape.mlp,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocabulary,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": harness.ROPE_THETA},
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        use_cache=False,
        attn_implementation="sdpa" if arguments.masks == "whole" else "causal_sdpa",
        dtype=torch.float32,
    )
    with torch_step.device():
        return LlamaForCausalLM(config).train()


def main() -> int:
    parser = torch_step.parser(__doc__.splitlines()[0], compile_by="whole")
    parser.add_argument("--masks", choices=("none", "whole"), default="none", help="whole: as the model does")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    model = build(arguments)
    torch_step.round_embedding(model.model.embed_tokens, arguments.residual)
    torch_step.use_float8(model.model.layers, arguments.float8)

    def head_loss(hidden, targets):
        logits = model.lm_head(hidden)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=-100)

    if arguments.compile == "blocks":
        for layer in model.model.layers:
            layer.compile(mode=arguments.mode)
        head_loss = torch.compile(head_loss, mode=arguments.mode)

    def loss_of(tokens, targets):
        return head_loss(model.model(input_ids=tokens).last_hidden_state, targets)

    if arguments.compile == "whole":
        loss_of = torch.compile(loss_of, mode=arguments.mode)
    packages = ("transformers", *(["torchao"] if arguments.float8 != "none" else []))
    harness.emit(torch_step.measure(loss_of, model, arguments, **harness.versions(*packages)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
