"""A run's weights as a folder that Hugging Face's transformers and vLLM read."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxthru import config as configuration
from jaxthru.build.adapted_weights import export_adapter, merged_weights
from jaxthru.build.language_model import folder_of, run_at, run_config
from jaxthru.config import RunConfig
from jaxthru.data.store.tokenizer import Tokenizer
from jaxthru.data.store.tokenizer_folder import FILES as TOKENIZER_FILES
from jaxthru.huggingface.config import read_config, written
from jaxthru.huggingface.folder import check_empty, read_json
from jaxthru.huggingface.generation_config import FILE as GENERATION_CONFIG
from jaxthru.huggingface.generation_config import read_generation_defaults
from jaxthru.huggingface.weights import Weights
from jaxthru.huggingface.write import write_folder
from jaxthru.models import family
from jaxthru.models.family import FamilyConfig
from jaxthru.models.published import Tensor
from jaxthru.runtime import plain, xla
from jaxthru.runtime.errors import require
from jaxthru.training.model_card import model_card
from jaxthru.training.run_directory import RunDirectory
from jaxthru.training.saved import SavedParameters

DTYPES = ("float32", "bfloat16", "float16")


def export_weights(
    where: Path | str | RunDirectory,
    folder: Path | str,
    *,
    step: int | None = None,
    dtype: str | None = None,
    adapter: bool | None = None,
    overrides: Sequence[str] = (),
) -> Path:
    """Writes the weights of a run, or of a folder of published weights, as a folder of its own; returns it.

    where: a run directory, or a folder. folder: new, or empty. step: which checkpoint; None is the newest.
    dtype: of the weights; None is that of the weights the run started from, or without these float32, or what
    the run kept. adapter: of a run that trained adapters, whether to write these alone, in PEFT's form, or
    the base with them in it; it has no default. overrides: a family of your own has to be named, as
    `model.family=package.module`.

    The folder appears whole, its file STABLE last. Raises InputError, before anything is written.
    """
    path, folder = folder_of(where), Path(folder).expanduser()
    require(dtype is None or dtype in DTYPES, f"--dtype {dtype}: must be one of {', '.join(DTYPES)}")
    check_empty(folder)
    xla.configure()
    if run := run_at(path, step):
        config = run_config(run, overrides)
        _check_form(path, config, adapter)
        _export_run(run, config, folder, step, dtype, adapter)
    else:
        _check_form(path, None, adapter)
        said = f"--set {' '.join(overrides)}: {path} is no run directory, it has no settings"
        require(not overrides, said)
        _export_folder(path, folder, dtype)
    return folder


def _check_form(path: Path, config: RunConfig | None, adapter: bool | None) -> None:
    asked, adapted = "--adapter" if adapter else "--merged", config is not None and config.lora.on
    require(
        adapted or adapter is None,
        f"{asked}: {path} {'is no run' if config is None else 'trained the whole model'}; leave it out",
    )
    require(
        not adapted or adapter is not None,
        f"{path}: is a run of adapters (lora.rank); give --adapter for these alone, or --merged for the base "
        "with them in it",
    )


def _export_run(
    run: RunDirectory,
    config: RunConfig,
    folder: Path,
    step: int | None,
    dtype: str | None,
    adapter: bool | None,
) -> None:
    family.published(config.model)  # or there is no table of its names
    saved = SavedParameters(run.checkpoints, step)
    base = _read_json(run.base / "config.json")
    kept = "float32" if saved.exact else "bfloat16"
    dtype = dtype or _dtype_of(base) or kept
    tokenizer = Tokenizer.of(run.path)
    settings = plain.flat(configuration.to_dict(config))
    if adapter:
        card = model_card(run, settings, folder.name, saved.step, "float32", relation="adapter")
        export_adapter(run, config, saved, folder, tokenizer_files(tokenizer, config.model.longest), card)
        return
    card = model_card(run, settings, folder.name, saved.step, dtype)
    files = tokenizer_files(tokenizer, config.model.longest) | {
        "config.json": _json(written(config.model, dtype, base) | _token_ids(tokenizer, base)),
        "README.md": card.encode(),
    }
    if (generation := _generation_config(run, tokenizer, base)) is not None:
        files[GENERATION_CONFIG] = generation
    files |= {path.name: path.read_bytes() for path in run.base.glob("*") if _is_license(path)}
    weights = merged_weights(config, saved.master, run) if config.lora.on else saved.master
    read = _reader(config.model, weights)
    write_folder(folder, config.model, read, dtype_of=lambda tensor: dtype, files=files)


def _export_folder(source: Path, folder: Path, dtype: str | None) -> None:
    model, raw = read_config(source)
    weights = Weights(source, model)
    files = {path.name: path.read_bytes() for path in sorted(source.iterdir()) if _belongs(path)}
    if dtype is not None:
        files["config.json"] = _json(written(model, dtype, raw))
    of = (lambda tensor: dtype) if dtype else (lambda tensor: weights.dtypes[tensor.path])
    like = None if dtype else weights.folder
    write_folder(folder, model, _reader(model, weights.array), dtype_of=of, files=files, like=like)


def _belongs(path: Path) -> bool:
    """Says whether a file of a folder is carried on as it is: what says how to use the weights, or by which
    right."""
    kept = path.suffix in (".json", ".jinja", ".md") or path.name in TOKENIZER_FILES or _is_license(path)
    return kept and path.is_file() and not path.name.endswith((".index.json", ".safetensors"))


def _is_license(path: Path) -> bool:
    return path.name.startswith(("LICENSE", "NOTICE"))


def _reader(config: FamilyConfig, read: Callable[..., jax.Array]) -> Callable[[Tensor], jax.Array]:
    """Returns what reads the weight of a published tensor, on one device. read: (its place, like) -> it."""
    shapes = {tensor.path: shape for tensor, _, shape in family.published_weights(config)}
    where = jax.sharding.SingleDeviceSharding(jax.devices()[0])

    def weight(tensor: Tensor) -> jax.Array:
        return read(tensor.path, jax.ShapeDtypeStruct(shapes[tensor.path], jnp.float32, sharding=where))

    return weight


def tokenizer_files(tokenizer: Tokenizer, longest: int | None) -> dict[str, bytes]:
    """Returns the files of a tokenizer, with the settings that `AutoTokenizer` needs where it has none."""
    files = dict(tokenizer.files)
    if "tokenizer_config.json" not in files:
        ends = {"eos_token": tokenizer.borders.end, "bos_token": tokenizer.borders.bos}
        named = {name: each for name, each in ends.items() if each}
        longest_row = {"model_max_length": longest} if longest else {}
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        files["tokenizer_config.json"] = _json(settings | named | longest_row)
    return files


def _token_ids(tokenizer: Tokenizer, base: dict[str, Any] | None) -> dict[str, Any]:
    """Returns the ids of the tokens that begin and end a text, if no base has them."""
    if base is not None:
        return {}
    ids = {"bos_token_id": tokenizer.bos, "eos_token_id": tokenizer.end_of_text}
    return {name: each for name, each in ids.items() if each is not None}


def _generation_config(run: RunDirectory, tokenizer: Tokenizer, base: dict[str, Any] | None) -> bytes | None:
    """Returns the generation_config.json of an export, None for none: that of the base, with the tokens
    that the run's documents ended with, and turns in them, among those that end a text."""
    learnt = tokenizer.learnt_stop
    if base is None:
        ends = {"eos_token_id": list(learnt)} if len(learnt) > 1 else {}
        return _json(_token_ids(tokenizer, None) | ends)
    kept, stop = _bytes(run.base / GENERATION_CONFIG), read_generation_defaults(run.base).stop
    ends = list(dict.fromkeys((*stop, *learnt)))
    unsaid = not stop and len(learnt) == 1  # of a base that names none, all is kept as it is
    if unsaid or len(ends) == len(stop):
        return kept
    keys = json.loads(kept) if kept else {}
    return _json(keys | {"eos_token_id": ends if len(ends) > 1 else ends[0]})


def _dtype_of(base: dict[str, Any] | None) -> str | None:
    found = (base or {}).get("dtype") or (base or {}).get("torch_dtype")
    return found if found in DTYPES else None


def _read_json(path: Path) -> dict[str, Any] | None:
    return read_json(path) if path.is_file() else None


def _bytes(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


def _json(keys: dict[str, Any]) -> bytes:
    return (json.dumps(keys, indent=2, ensure_ascii=False) + "\n").encode()
