"""Compares jaxthru with transformers on the same folders of weights: logits, greedy text, exports.

    python scripts/bench/suite.py published --rows parity
    python scripts/bench/measure/published_parity.py FAMILY [--sequence 4096] [--tiny]

Needs torch and transformers. transformers makes a model of random weights, with the family's own classes, and
saves it; jaxthru loads that folder. Weights are drawn wide, so that logits differ by several nats, as a
trained model's do. transformers computes on the CPU, in float32 by its eager attention; jaxthru on JAX's
default backend (JAX_PLATFORMS=cpu for the CPU).

What is found: the largest difference of float32 logits at any position, and the mean and largest KL
divergence of a token, summed over the vocabulary; in bfloat16 the mean KL from transformers' float32 of
jaxthru's, and of transformers' own bfloat16; whether an export of the untrained folder has equal bytes, and
what `from_pretrained` misses of an export after two updates, with greedy text compared.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import harness
import numpy as np
from scipy.special import log_softmax

SHAPE = {"vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 6}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
TINY = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 7}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 1024}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 1024}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama3": ("LlamaConfig", {"rope_parameters": LLAMA3}),
    "llama_yarn": ("LlamaConfig", {"rope_parameters": YARN}),
    "smollm": ("LlamaConfig", {"tie_word_embeddings": True}),
    "mistral": ("MistralConfig", {"sliding_window": 1000}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {"tie_word_embeddings": False}),
    "gemma3": ("Gemma3TextConfig", {"sliding_window": 512, "query_pre_attn_scalar": 64}),
}
PROMPT = [3, 17, 40, 5, 90, 11, 7]
NEW_TOKENS = 64


def logits(folder: Path, tokens: np.ndarray, dtype: str) -> np.ndarray:
    """Returns transformers' logits [T, V], on the CPU. The model is loaded anew: one that is cast has
    frequencies of positions in the dtype that it had before."""
    import torch

    with torch.no_grad():
        return reloaded(folder, dtype)(torch.tensor(tokens[None].astype(np.int64))).logits[0].float().numpy()


def reloaded(folder: Path, dtype: str, **options) -> Any:
    """Returns the model of a folder, as transformers loads it."""
    import torch
    import transformers

    options |= {"dtype": getattr(torch, dtype), "attn_implementation": "eager"}
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options)


def make(name: str, path: Path, shape: dict[str, int], sequence: int) -> None:
    """Has transformers save a folder of random weights of a family, in bfloat16."""
    import torch
    import transformers

    kind, keys = FAMILIES[name]
    keys = shape | HEADS | {"max_position_embeddings": 2 * sequence, "initializer_range": 0.05} | keys
    config = getattr(transformers, kind)(**keys, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases are drawn too, or none would notice them
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.to(torch.bfloat16).save_pretrained(path)
    tokenizer(path, keys["vocab_size"])


def tokenizer(path: Path, vocabulary: int) -> None:
    """Writes a tokenizer of so many tokens, which are words of digits."""
    import tokenizers
    import transformers

    words = {"<pad>": 0, "<s>": 1, "</s>": 2} | {str(index): index for index in range(3, vocabulary)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, **special).save_pretrained(path)


def divergence(expected: np.ndarray, found: np.ndarray) -> np.ndarray:
    """Returns the KL divergence of each token, summed over the vocabulary, [T]. Both are logits [T, V]."""

    expected, found = (log_softmax(logits.astype(np.float64), axis=-1) for logits in (expected, found))
    return (np.exp(expected) * (expected - found)).sum(-1)


def compared(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns what is found of a family."""
    harness.need("torch", "transformers")
    harness.keep_stdout()  # transformers tells its progress
    shape, sequence = (TINY, 96) if arguments.tiny else (SHAPE, arguments.sequence)
    about = {"family": arguments.family, "weights": "random", "shape": shape, "sequence": sequence}
    about |= {"versions_of_peers": harness.versions("torch", "transformers")}
    with tempfile.TemporaryDirectory() as work:
        return about | measured(arguments.family, Path(work), shape, sequence)


def measured(name: str, work: Path, shape: dict[str, int], sequence: int) -> dict[str, Any]:
    """Returns how far logits are from transformers', and what comes of exports."""
    import jaxthru

    folder = work / name
    make(name, folder, shape, sequence)
    tokens = np.random.default_rng(1).integers(3, shape["vocab_size"], sequence).astype(np.int32)
    exact, theirs = (logits(folder, tokens, dtype) for dtype in ("float32", "bfloat16"))
    ours, rounded = (
        jaxthru.load(folder, [f"precision.compute={dtype}"]).logits(tokens)
        for dtype in ("float32", "bfloat16")
    )
    kl = divergence(exact, ours)
    row = {
        "spread_of_logits": round(float(exact.std()), 3),
        "float32_difference": float(np.abs(exact - ours).max()),
        "float32_kl": [float(kl.mean()), float(kl.max())],
        "float32_kl_largest": float(kl.max()),
        "bfloat16_kl": float(divergence(exact, rounded).mean()),
        "bfloat16_kl_of_transformers": float(divergence(exact, theirs).mean()),
    }
    return row | exported(folder, work / f"{name}-exports")


def exported(folder: Path, work: Path) -> dict[str, Any]:
    """Returns what came of exports of a folder: untrained, and after two updates."""
    import torch

    import jaxthru

    again = jaxthru.export_weights(folder, work / "untrained")
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    equal = all((folder / name).read_bytes() == (again / name).read_bytes() for name in files)
    out = jaxthru.export_weights(trained(folder, work), work / "trained", dtype="float32")
    model, info = reloaded(out, "float32", output_loading_info=True)
    ours = jaxthru.load(out, ["precision.compute=float32"])
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    text = model.generate(torch.tensor([PROMPT]), **options)[0, len(PROMPT) :].tolist()
    (found,) = ours.tokens([PROMPT], max_tokens=NEW_TOKENS, temperature=0, stop=())
    missed = {
        f"{kind}_keys": sorted(map(str, info[f"{kind}_keys"]))
        for kind in ("missing", "unexpected", "mismatched")
    }
    same = found.tolist() == text
    good = equal and same and not any(missed.values())
    return {"untrained_bytes_equal": equal, **missed, "greedy_text_equal": same, "folders_equal": int(good)}


def trained(folder: Path, work: Path) -> Path:
    """Returns a run directory of two updates from a folder, on numbers."""
    import jaxthru

    corpus = work / "corpus"
    corpus.mkdir(parents=True)
    digits = np.random.default_rng(2).integers(3, 200, (64, 80))
    for index, line in enumerate(digits):
        (corpus / f"{index}.txt").write_text(" ".join(map(str, line)))
    (work / "mix.toml").write_text(
        '[sources.numbers]\nrecipe = "local_text"\npaths = ["corpus/*.txt"]\nweight = 1\n'
    )
    settings = [f"model.pretrained={folder}", f"data.mix={work}/mix.toml", f"data.store={work}/store"]
    settings += ["train.steps=2", "train.rows=4", "data.sequence=64", "optim.learning_rate=1e-3"]
    settings += ["precision.compute=float32", "evaluate.rows=0", "kernels.attention=xla", "mesh.fsdp=1"]
    jaxthru.run(jaxthru.load_config(harness.ROOT / "configs" / "continued.py", settings), work / "run")
    return work / "run"


main = harness.program(
    __doc__,
    compared,
    harness.option("family", choices=FAMILIES),
    harness.option("--sequence", type=int, default=4096),
    harness.option("--tiny", action="store_true", help="small shapes"),
    config=False,
)


if __name__ == "__main__":
    sys.exit(main())
