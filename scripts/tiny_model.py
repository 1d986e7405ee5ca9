"""python scripts/tiny_model.py FOLDER: a tiny chat model in Hugging Face's form, in seconds and offline.

Its weights are random and it knows nothing: it is what configs/sft.py, lora.py and dpo.py are tried with
where no published weights are at hand. It has a tokenizer of its own, made of Python's documentation, and
ChatML as its chat template.
"""

import argparse
import json
import pydoc_data.topics
import sys
import tempfile
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from jaxthru.config import ModelConfig
from jaxthru.data.store.tokenizer import train
from jaxthru.data.store.tokenizer_folder import CONTROL, OWN, SHIPPED, TEMPLATE
from jaxthru.huggingface.config import written
from jaxthru.huggingface.folder import check_empty
from jaxthru.huggingface.write import write_folder
from jaxthru.models import family
from jaxthru.runtime.errors import exit_code

SHAPE = ModelConfig(
    vocabulary=4096, layers=4, embed=128, heads=4, kv_heads=2, head_dim=32, mlp=384, max_sequence=4096
)
END, TURN_END = "<|endoftext|>", CONTROL[1]
DTYPE = "float32"


def tokenizer_files() -> dict[str, bytes]:
    """Returns {name: content} of the tokenizer's files."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "tokenizer.json")
        train(iter(pydoc_data.topics.topics.values()), SHAPE.vocabulary, file, CONTROL)
        made = file.read_bytes()
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": TURN_END, "pad_token": END}
    return {
        "tokenizer.json": made,
        "tokenizer_config.json": json.dumps(settings, indent=2).encode(),
        TEMPLATE: SHIPPED[OWN].read_bytes(),
    }


def write(folder: Path, seed: int) -> None:
    """Writes the folder. seed: of the weights. Raises InputError if it is there and not empty."""
    check_empty(folder)
    draw = np.random.default_rng(seed)
    weights = {}
    for tensor, info, shape in family.published_weights(SHAPE):
        scale = np.float32(0.02) * draw.standard_normal(shape, np.float32)
        weights[tensor.path] = jnp.ones(shape) if info.role == "norm" else jnp.asarray(scale)
    files = tokenizer_files()
    known = {each["content"]: each["id"] for each in json.loads(files["tokenizer.json"])["added_tokens"]}
    ends = [known[TURN_END], known[END]]
    keys = written(SHAPE, DTYPE, None) | {"eos_token_id": ends}
    files["config.json"] = json.dumps(keys, indent=2).encode()
    files["generation_config.json"] = json.dumps({"eos_token_id": ends}, indent=2).encode()
    write_folder(folder, SHAPE, lambda tensor: weights[tensor.path], lambda tensor: DTYPE, files)


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    parser = argparse.ArgumentParser(description="Makes a tiny chat model with random weights.")
    parser.add_argument("folder", type=Path, help="new, or empty")
    parser.add_argument("--seed", type=int, default=0, help="of the weights; default: %(default)s")
    arguments = parser.parse_args(argv)
    return exit_code(lambda: write(arguments.folder, arguments.seed))


if __name__ == "__main__":
    sys.exit(main())
