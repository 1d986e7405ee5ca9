"""Hugging Face's Llama generating greedily with a static cache and torch.compile: prints one JSON line.

PYTHONPATH=scripts/bench python -m peers.hugging_face_decode [--batch N] [--prompt TOKENS] [--generate TOKENS]
"""

import argparse
import sys
from typing import Any

import harness
import text_timing

harness.need("torch", "transformers")

import torch  # noqa: E402
from peers import torch_step  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402


def build(shape: harness.Shape) -> LlamaForCausalLM:
    """Returns the model with random weights, in bfloat16 on a GPU."""
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
        eos_token_id=None,
        pad_token_id=0,
        dtype=torch.bfloat16,
    )
    torch.set_default_dtype(torch.bfloat16)
    with torch_step.device():
        return LlamaForCausalLM(config).eval()


def decode(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns what is to be said of a batch."""
    torch.manual_seed(0)
    shape = harness.Shape.of(arguments)
    model = build(shape)
    ids = torch.randint(0, shape.vocabulary, (arguments.batch, arguments.prompt), device=model.device)
    mask = torch.ones_like(ids)

    def generate(count: int):
        with torch.inference_mode():
            # A static cache makes transformers compile its decoding step, with CUDA graphs.
            return model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
                cache_implementation="static",
            )

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {
        **text_timing.timed(generate, lambda made: made[0, -1].item(), arguments),
        "device": {"kind": device},
        "versions": harness.versions("torch", "transformers"),
        "commit": harness.commit(),
    }


keys = {"config": False, "seconds": (20.0, 40.0), "elsewhere": True}
main = harness.program(__doc__, decode, *text_timing.OPTIONS, **keys)


if __name__ == "__main__":
    sys.exit(main())
