"""Records logits and gradients of tiny models by Hugging Face's transformers, in float32 on a CPU.

    python tests/golden/record_transformers.py [NAME ...]

needs numpy, torch and transformers, and neither JAX nor jaxthru: what it records is a reference that shares
no code with them. It writes transformers_<name>.npz beside itself, for tests/models/test_transformers.py.
Versions and settings stand in each file under `about`, as JSON.

An array is named after the parameter in transformers: `weight/<name>` (float16: the values used are no finer)
and `gradient/<name>`. `logits` are those at `positions` of each row.
"""

import json
import platform
import sys
from pathlib import Path

import numpy as np
import torch
import transformers

FOLDER = Path(__file__).resolve().parent
COMMON = {
    "vocab_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "attn_implementation": "eager",
}
# Embeddings are small, so that the first norms feel their epsilon. `rows` of `sequence` tokens.
MODELS = {
    # Past 256 positions, where bfloat16 has no odd numbers, and past the length that scaling starts from.
    "llama3": {
        "family": "Llama",
        "rows": 1,
        "sequence": 512,
        "z_loss": 1e-2,
        "config": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "max_position_embeddings": 512,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1e4,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 128,
            },
        },
    },
    "qwen3": {
        "family": "Qwen3",
        "rows": 2,
        "sequence": 96,
        "z_loss": 0.0,
        "config": {
            "hidden_size": 24,
            "intermediate_size": 40,
            "num_hidden_layers": 3,
            "max_position_embeddings": 96,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
    },
}


def draw(model: torch.nn.Module, random: np.random.Generator) -> dict[str, np.ndarray]:
    """Gives a model new weights, and returns them: norms too, which all ones would hide."""
    drawn = {}
    for name, parameter in model.named_parameters():
        shape = tuple(parameter.shape)
        if "norm" in name:
            value = random.uniform(0.5, 1.5, shape)
        elif "embed_tokens" in name:
            value = random.normal(0, 0.02, shape)
        else:
            value = random.normal(0, shape[-1] ** -0.5, shape)
        drawn[name] = value.astype(np.float16)
        with torch.no_grad():
            parameter.copy_(torch.from_numpy(drawn[name].astype(np.float32)))
    return drawn


def record(name: str, seed: int) -> None:
    """Writes the file of one of MODELS."""
    settings, random = MODELS[name], np.random.default_rng(seed)
    config = getattr(transformers, f"{settings['family']}Config")(**COMMON, **settings["config"])
    model = getattr(transformers, f"{settings['family']}ForCausalLM")(config).float().eval()
    weights = draw(model, random)
    shape = settings["rows"], settings["sequence"]
    tokens, targets = random.integers(0, COMMON["vocab_size"], (2, *shape))
    mask = random.random(shape) < 0.7
    logits = model(input_ids=torch.from_numpy(tokens), use_cache=False).logits
    log_z = torch.logsumexp(logits, -1)
    chosen = torch.gather(logits, -1, torch.from_numpy(targets)[..., None])[..., 0]
    losses = log_z - chosen + settings["z_loss"] * log_z**2
    minimised = losses[torch.from_numpy(mask)].mean()
    minimised.backward()
    positions = np.unique(np.linspace(0, settings["sequence"] - 1, 48).astype(int))
    about = {
        "model": settings,
        "common": COMMON,
        "seed": seed,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }
    np.savez_compressed(
        FOLDER / f"transformers_{name}.npz",
        about=json.dumps(about),
        tokens=tokens.astype(np.uint8),
        targets=targets.astype(np.uint8),
        loss_mask=mask,
        minimised=minimised.detach().numpy(),
        positions=positions,
        logits=logits.detach().numpy()[:, positions],
        **{f"weight/{key}": value for key, value in weights.items()},
        **{f"gradient/{key}": value.grad.numpy() for key, value in model.named_parameters()},
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    for index, name in enumerate(MODELS):
        if name in (sys.argv[1:] or MODELS):
            record(name, seed=index)
