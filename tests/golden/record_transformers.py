"""Records logits and gradients of tiny models by Hugging Face's transformers, in float32 on a CPU.

    python tests/golden/record_transformers.py [--folders DIR] [NAME ...]

needs numpy, torch and transformers 5, and neither JAX nor jaxthru: what it records is a reference that shares
no code with them. It writes transformers_<name>.npz beside itself, for tests/models/test_transformers.py.
Versions and settings stand in each file under `about`, as JSON.

An array is named after the parameter in transformers: `weight/<name>` (float16: the values used are no finer)
and `gradient/<name>`. `logits` are those at `positions` of each row. A model without a `z_loss` has
neither gradients nor a loss.

--folders DIR: also writes DIR/<name>, the model by `save_pretrained`, of those that have `folder`, the dtype
(of those with `folder_alone`, nothing else is written);
with `golden.npz` in it: `tokens`, and of them `logits` at `positions`, in float32 of the weights saved.
"""

import argparse
import json
import platform
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
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
SMALL = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3, "rms_norm_eps": 1e-6}
EXPERTS = {
    "num_hidden_layers": 2,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
    "pad_token_id": None,
}
# Embeddings are small, so that the first norms feel their epsilon. `rows` of `sequence` tokens. New models
# stand at the end: the number of a model is its seed.
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
            "rope_parameters": LLAMA3,
        },
    },
    "qwen3": {
        "family": "Qwen3",
        "rows": 2,
        "sequence": 96,
        "z_loss": 0.0,
        "folder": "float32",
        "config": {
            **SMALL,
            "max_position_embeddings": 96,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
    },
    "qwen2": {
        "family": "Qwen2",
        "rows": 2,
        "sequence": 96,
        "z_loss": 0.0,
        "folder": "float32",
        "config": {
            **SMALL,
            "max_position_embeddings": 96,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
    },
    # A window shorter than the row, and no multiple of anything.
    "mistral": {
        "family": "Mistral",
        "rows": 2,
        "sequence": 96,
        "z_loss": 0.0,
        "folder": "float32",
        "config": {
            **SMALL,
            "max_position_embeddings": 96,
            "sliding_window": 21,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "llama_yarn": {
        "family": "Llama",
        "rows": 1,
        "sequence": 256,
        "z_loss": 0.0,
        "config": {
            **SMALL,
            "max_position_embeddings": 256,
            "tie_word_embeddings": False,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    },
    "llama_linear": {
        "family": "Llama",
        "rows": 1,
        "sequence": 256,
        "z_loss": 0.0,
        "config": {
            **SMALL,
            "max_position_embeddings": 256,
            "tie_word_embeddings": False,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
        },
    },
    # Seven layers: the pattern of six, and the rest of one.
    "gemma3": {
        "family": "Gemma3Text",
        "model": "Gemma3ForCausalLM",
        "rows": 2,
        "sequence": 96,
        "z_loss": 0.0,
        "folder": "float32",
        "config": {
            **SMALL,
            "num_hidden_layers": 7,
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "sliding_window": 16,
            "max_position_embeddings": 96,
            "tie_word_embeddings": True,
            "pad_token_id": None,  # by default it is 0, whose row of the table then gets no gradient
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    },
    "smollm": {
        "family": "Llama",
        "rows": 2,
        "sequence": 96,
        "z_loss": 0.0,
        "folder": "bfloat16",
        "config": {
            **SMALL,
            "max_position_embeddings": 96,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    # Angles of late positions, where frequencies that are rounded otherwise are far off.
    "llama_4096": {
        "family": "Llama",
        "rows": 1,
        "sequence": 4096,
        "z_loss": None,
        "config": {
            **SMALL,
            "num_hidden_layers": 2,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": False,
            "rope_parameters": LLAMA3 | {"rope_theta": 5e5, "original_max_position_embeddings": 1024},
        },
    },
    "mixtral": {
        "family": "Mixtral",
        "rows": 1,
        "sequence": 48,
        "z_loss": None,
        "folder": "float32",
        "folder_alone": True,
        "config": {
            **SMALL,
            **EXPERTS,
            "num_local_experts": 6,
            "max_position_embeddings": 48,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
    },
    # Its first layer is dense.
    "qwen3_moe": {
        "family": "Qwen3Moe",
        "rows": 1,
        "sequence": 48,
        "z_loss": None,
        "folder": "float32",
        "folder_alone": True,
        "config": {
            **SMALL,
            **EXPERTS,
            "num_experts": 6,
            "moe_intermediate_size": 16,
            "mlp_only_layers": [0],
            "norm_topk_prob": True,
            "max_position_embeddings": 48,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
    },
    "olmoe": {
        "family": "Olmoe",
        "rows": 1,
        "sequence": 48,
        "z_loss": None,
        "folder": "float32",
        "folder_alone": True,
        "config": {
            **SMALL,
            **EXPERTS,
            "num_experts": 6,
            "head_dim": 6,
            "max_position_embeddings": 48,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
}


def draw(model: torch.nn.Module, random: np.random.Generator, offset: float) -> dict[str, np.ndarray]:
    """Gives a model new weights, and returns them: norms too, which all ones would hide, and biases. offset:
    what the model adds to the scales of its norms."""
    drawn = {}
    for name, parameter in model.named_parameters():
        shape = tuple(parameter.shape)
        if "norm" in name:
            value = random.uniform(0.5, 1.5, shape) - offset
        elif "embed_tokens" in name:
            value = random.normal(0, 0.02, shape)
        else:
            value = random.normal(0, shape[-1] ** -0.5, shape)
        drawn[name] = value.astype(np.float16)
        with torch.no_grad():
            parameter.copy_(torch.from_numpy(drawn[name].astype(np.float32)))
    return drawn


def made(settings: dict) -> torch.nn.Module:
    """Returns one of MODELS, in float32."""
    config = getattr(transformers, f"{settings['family']}Config")(**COMMON | settings["config"])
    model = settings.get("model", f"{settings['family']}ForCausalLM")
    return getattr(transformers, model)(config).float().eval()


def logits_of(model: torch.nn.Module, tokens: np.ndarray) -> torch.Tensor:
    return model(input_ids=torch.from_numpy(tokens), use_cache=False).logits


def gradients(model: torch.nn.Module, tokens, targets, mask, z_loss: float) -> tuple[dict, np.ndarray]:
    """Returns what else a file has of a model with gradients, and its logits."""
    logits = logits_of(model, tokens)
    log_z = torch.logsumexp(logits, -1)
    chosen = torch.gather(logits, -1, torch.from_numpy(targets)[..., None])[..., 0]
    losses = log_z - chosen + z_loss * log_z**2
    minimised = losses[torch.from_numpy(mask)].mean()
    minimised.backward()
    arrays = {
        "targets": targets.astype(np.uint8),
        "loss_mask": mask,
        "minimised": minimised.detach().numpy(),
        **{f"gradient/{key}": value.grad.numpy() for key, value in model.named_parameters()},
    }
    return arrays, logits.detach().numpy()


def record(name: str, seed: int, folders: Path | None) -> None:
    """Writes the files of one of MODELS."""
    settings, random = MODELS[name], np.random.default_rng(seed)
    model = made(settings)
    weights = draw(model, random, offset=1.0 if settings["family"].startswith("Gemma") else 0.0)
    shape = settings["rows"], settings["sequence"]
    tokens, targets = random.integers(0, COMMON["vocab_size"], (2, *shape))
    mask = random.random(shape) < 0.7
    if settings["z_loss"] is not None:
        arrays, logits = gradients(model, tokens, targets, mask, settings["z_loss"])
    else:
        with torch.no_grad():
            arrays, logits = {}, logits_of(model, tokens).numpy()
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
    if not settings.get("folder_alone"):
        np.savez_compressed(
            FOLDER / f"transformers_{name}.npz",
            about=json.dumps(about),
            tokens=tokens.astype(np.uint8),
            positions=positions,
            logits=logits[:, positions],
            **arrays,
            **{f"weight/{key}": value for key, value in weights.items()},
        )
    if folders is not None and "folder" in settings:
        save(model, folders / name, settings["folder"], tokens, positions)


def save(model: torch.nn.Module, folder: Path, dtype: str, tokens: np.ndarray, positions: np.ndarray) -> None:
    """Writes a folder of a model's weights in a dtype, and the logits in float32 of a model read from it."""
    kind = getattr(torch, dtype)
    model = model.to(kind)
    model.config.dtype = kind
    model.save_pretrained(folder)
    # Read anew: casting a model rounds its wavelengths too, which no file holds.
    how = {"dtype": torch.float32, "attn_implementation": COMMON["attn_implementation"]}
    read = type(model).from_pretrained(folder, **how).eval()
    with torch.no_grad():
        logits = logits_of(read, tokens).numpy()[:, positions]
    arrays = {"tokens": tokens.astype(np.uint8), "positions": positions, "logits": logits}
    np.savez_compressed(folder / "golden.npz", **arrays)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Records tiny models by transformers.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="of these alone, instead of all")
    parser.add_argument("--folders", type=Path, help="where to write folders of weights too")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for index, name in enumerate(MODELS):
        if name in (arguments.names or MODELS):
            record(name, index, arguments.folders)
