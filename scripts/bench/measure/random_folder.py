"""Makes a folder of random weights in Hugging Face's form, of a configuration's shape, to time starts by.

    python scripts/bench/measure/random_folder.py FOLDER --config llama3_8b_one_gpu [--set a.b=v ...]

The weights are one block of bfloat16 numbers over and over; the tokenizer is that of the configuration's
text.
"""

import argparse
import json
import sys
from pathlib import Path

import ml_dtypes
import numpy as np

from jaxthru import config as configuration
from jaxthru.build.export_weights import tokenizer_files
from jaxthru.data.loading.dataset import open_data
from jaxthru.huggingface.config import written
from jaxthru.huggingface.write import write_folder
from jaxthru.models import family
from jaxthru.runtime.errors import exit_code

DEVIATION = 0.02


def make(folder: Path, config: configuration.RunConfig) -> None:
    """Writes the folder. Raises InputError."""
    model = config.model
    block = (np.random.default_rng(0).standard_normal(1 << 24) * DEVIATION).astype(ml_dtypes.bfloat16)
    shapes = {tensor.path: shape for tensor, _, shape in family.published_weights(model)}
    keys = written(model, "bfloat16", None)
    files = {"config.json": json.dumps(keys, indent=2).encode()}
    with open_data(config.data) as data:
        files |= tokenizer_files(data.tokenizer, model.longest)
    read = lambda tensor: np.resize(block, shapes[tensor.path])  # noqa: E731
    write_folder(folder, model, read, lambda tensor: "bfloat16", files)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="new, or empty")
    configuration.add_arguments(parser)
    arguments = parser.parse_args()
    return exit_code(lambda: make(arguments.folder, configuration.from_arguments(arguments)))


if __name__ == "__main__":
    sys.exit(main())
