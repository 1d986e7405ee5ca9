"""A trained model to use: of a run directory, or of a folder of published weights.

Shapes: B rows, T tokens, V vocabulary.
"""

import contextlib
import dataclasses
import functools
import json
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxthru import config as configuration
from jaxthru.build.adapted_weights import merged_weights, without_adapters
from jaxthru.build.checks import attention_by, check_vocabulary, refusals_named, validate
from jaxthru.build.step import bound
from jaxthru.config import DataConfig, MeshConfig, OffloadConfig, RematConfig, RunConfig
from jaxthru.data.store.tokenizer import Tokenizer
from jaxthru.engine.model import Model
from jaxthru.generation.generator import Generator, Scores, check_context
from jaxthru.generation.sampling import Sampling
from jaxthru.huggingface.config import read_config
from jaxthru.huggingface.generation_config import GenerationDefaults, read_generation_defaults
from jaxthru.huggingface.weights import Weights
from jaxthru.runtime import hardware, xla
from jaxthru.runtime.bucket import STORES, is_url, scheme_of
from jaxthru.runtime.errors import InputError, require
from jaxthru.runtime.sharding import Layout
from jaxthru.training import layout as on_disk
from jaxthru.training.run_directory import RunDirectory
from jaxthru.training.saved import SavedParameters, abstract_parameters

log = logging.getLogger("jaxthru")
Tree = Any
Text = str | Sequence[int]
"""A text, or its tokens."""


@dataclasses.dataclass(frozen=True, eq=False)
class LanguageModel:
    """A trained model. step: of the checkpoint it is from, None of published weights. defaults: how it is
    meant to be sampled. read: returns the parameters, on the devices."""

    config: RunConfig
    tokenizer: Tokenizer
    model: Model
    step: int | None
    defaults: GenerationDefaults
    read: Callable[[], Tree]

    def __repr__(self) -> str:
        of = f"step {self.step:,}" if self.step is not None else "published weights"
        return f"<{self.config.model.family}: {self.model.parameters:,} parameters of {of}>"

    @functools.cached_property
    def params(self) -> Tree:
        """The parameters, matrices in the compute dtype. They are read when they are first used, so that what
        is wrong with a question is said before."""
        return self.read()

    @functools.cached_property
    def generator(self) -> Generator:
        """What makes tokens of tokens."""
        return Generator(self.model, self.params, self.longest)

    @property
    def longest(self) -> int | None:
        """Most tokens in a row, prompt and answer together."""
        return self.config.model.longest

    def logits(self, tokens: Sequence[int] | np.ndarray) -> np.ndarray:
        """Returns float32 [..., T, V]. tokens: ids [T], or [B, T]. Raises InputError."""
        tokens = np.asarray(tokens)
        with self._computing():
            found = self.generator.logits(np.atleast_2d(tokens))
        return np.asarray(found).reshape(*tokens.shape, -1)

    def loss(self, texts: str | Sequence[str]) -> float:
        """Returns the mean cross-entropy of the texts' tokens, in nats: each given all those before it.

        The first token of a text is not among them, as nothing stands before it. Raises InputError for texts
        without a second token, or longer than the model's rows.
        """
        rows = [self.encode(text) for text in ([texts] if isinstance(texts, str) else texts)]
        found = np.concatenate([self.logprobs(row)[0] for row in rows if len(row) > 1] or [[]])
        require(found.size > 0, "loss: the texts have no token that another stands before")
        return -float(np.mean(found))

    def logprobs(self, tokens: Sequence[int] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns of each token but the first its log-probability, float32 [T-1], and whether it is the most
        probable one, bool [T-1]. tokens: ids [T]."""
        (found,) = self.scores([tokens])
        return found.logprobs, found.likeliest

    def scores(self, rows: Sequence[Sequence[int] | np.ndarray]) -> list[Scores]:
        """Returns the same of rows of any lengths, computed as one batch. Raises InputError."""
        with self._computing():
            return self.generator.scores([np.asarray(row) for row in rows])

    def encode(self, text: Text) -> np.ndarray:
        """Returns the ids of a prompt: the BOS token if the tokenizer puts one first, then the text's. Ids
        come back as they are."""
        return self.tokenizer.encode_prompt(text) if isinstance(text, str) else np.asarray(text, np.int32)

    def generate(self, prompts: Text | Sequence[Text], **options: Any) -> str | list[str]:
        """Returns what follows each prompt: one text for one prompt, else a list. Special tokens are left
        out. options: see `tokens`. Raises InputError."""
        alone = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int | np.integer))
        found = self.tokens([prompts] if alone else prompts, **options)
        texts = [self.tokenizer.decode(each, skip_special=True) for each in found]
        return texts[0] if alone else texts

    def tokens(
        self,
        prompts: Sequence[Text],
        *,
        max_tokens: int = 128,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
        stop: Sequence[int] | None = None,
        on_tokens: Callable[[list[np.ndarray]], bool | None] | None = None,
    ) -> list[np.ndarray]:
        """Returns the ids that follow each prompt, without the one that ended it.

        max_tokens: at most so many. temperature: 0 takes the most probable token each time. top_k, top_p:
        sample among so many of the most probable tokens, and among those that make up so much of the
        probability. None of these is what the model's own generation_config.json says, or without one
        temperature 0. seed: of the samples. stop: ids that end a text; None is the model's own.
        on_tokens: see `Generator.generate`.

        Raises InputError: no prompt, or more tokens than a row of the model has.
        """
        ids = [self.encode(prompt) for prompt in prompts]
        given = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
        given = {
            name: getattr(self.defaults, name) if value is None else value for name, value in given.items()
        }
        sampling = Sampling(**given, seed=seed, max_tokens=max_tokens)
        for at, prompt in enumerate(ids):
            check_context(f"prompt {at + 1}", len(prompt), max_tokens, self.longest)
        with self._computing():
            ends = self.stop if stop is None else tuple(stop)
            found = self.generator.generate(ids, sampling, ends, on_tokens)
        return [each.tokens for each in found]

    @contextlib.contextmanager
    def _computing(self) -> Iterator[None]:
        """Multiplies float32 in float32, where GPUs and TPUs by themselves take fewer bits. Raises InputError
        for a kernel that was asked for and cannot run."""
        exact = self.config.precision.compute == "float32"
        with refusals_named(self.config), jax.default_matmul_precision("highest" if exact else None):
            yield

    @property
    def stop(self) -> tuple[int, ...]:
        """The ids that end a text."""
        return tuple(dict.fromkeys((*self.defaults.stop, *self.tokenizer.learnt_stop)))


def load(
    where: Path | str | RunDirectory, overrides: Sequence[str] = (), *, step: int | None = None
) -> LanguageModel:
    """Returns the model of a run directory, or of a folder of published weights in Hugging Face's form.

    where: the folder. overrides: settings to change, as `precision.compute=float32`; one device is used
    unless some say `mesh.`. A family of your own has to be named: `model.family=package.module`. step: which
    checkpoint of a run; None is the newest.
    Raises InputError, before the devices' memory is used, for what cannot be read or does not fit.
    """
    path = folder_of(where)
    xla.configure()  # before anything asks for a device
    if run := run_at(path, step):
        return _of_run(run, overrides, step)
    return _of_folder(path, overrides)


def folder_of(where: Path | str | RunDirectory) -> Path:
    """Returns the folder of a run, or of published weights. Raises InputError if there is none."""
    address = where.where if isinstance(where, RunDirectory) else str(where)
    if is_url(address):
        store = STORES.get(scheme_of(address))
        remedy = f"copy it first{f' (`{store.copy}`)' if store else ''}, and give the copy"
        raise InputError(f"{address}: a run in a bucket cannot be used from there; {remedy}")
    path = where.path if isinstance(where, RunDirectory) else Path(where).expanduser()
    require(path.is_dir(), f"{path}: no such folder; give a run directory, or a folder of published weights")
    return path


def run_at(path: Path, step: int | None) -> RunDirectory | None:
    """Returns the run in a folder, None for published weights. Raises InputError if these are asked for a
    step."""
    if is_run(path):
        return RunDirectory(path)
    require(step is None, f"--step {step}: {path} is no run directory, it has no steps")
    return None


def is_run(path: Path) -> bool:
    """Says whether a folder is a run directory, by its config.json."""
    try:
        keys = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return (path / "checkpoints").is_dir()
    return isinstance(keys, dict) and isinstance(keys.get("model"), dict)


def run_config(run: RunDirectory, overrides: Sequence[str] = ()) -> RunConfig:
    """Returns the configuration of a run, with overrides applied. Raises InputError."""
    require(run.config.is_file(), f"{run.path}: has no config.json; give a run directory")
    return configuration.load(run.config, overrides)


def _of_run(run: RunDirectory, overrides: Sequence[str], step: int | None) -> LanguageModel:
    config = run_config(run, overrides)
    saved = SavedParameters(run.checkpoints, step)
    tokenizer = Tokenizer.of(run.path)
    defaults = read_generation_defaults(run.base)
    read = saved.restore
    if config.lora.on:
        merged, config = merged_weights(config, saved.master, run), without_adapters(config)
        read = lambda abstract: on_disk.assembled(abstract, merged)  # noqa: E731
    return _loaded(config, overrides, tokenizer, defaults, read, saved.step)


def _of_folder(folder: Path, overrides: Sequence[str]) -> LanguageModel:
    model, _ = read_config(folder)
    weights, tokenizer = Weights(folder, model), Tokenizer.of(folder)
    longest = model.longest or DataConfig.sequence
    plain = RunConfig(model=model, data=DataConfig(sequence=min(DataConfig.sequence, longest)))
    if not any(word.startswith("precision.compute") for word in overrides):
        on_cpu = jax.default_backend() == "cpu"  # four times slower in bfloat16
        overrides = [*overrides, f"precision.compute={'float32' if on_cpu else 'bfloat16'}"]
    config, array = configuration.changed(plain, overrides), weights.array
    if config.lora.on:
        require(config.lora.adapter is not None, f"lora.rank: {folder} has no adapters; give lora.adapter")
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, pretrained=str(folder)))
        array, config = merged_weights(config), without_adapters(config)
    read = lambda abstract: on_disk.assembled(abstract, array)  # noqa: E731
    return _loaded(config, overrides, tokenizer, read_generation_defaults(folder), read, None)


def _loaded(
    config: RunConfig,
    overrides: Sequence[str],
    tokenizer: Tokenizer,
    defaults: GenerationDefaults,
    read: Callable[[Tree], Tree],
    step: int | None,
) -> LanguageModel:
    """Returns the model of a configuration. read: abstract parameters -> the parameters."""
    config, layout = _for_use(config, overrides)
    # A run may have named a kernel of the devices that it trained on.
    named = any(word.startswith("kernels.attention=") for word in overrides)
    attention = attention_by(config) if named else "auto"
    if attention == "auto" and config.precision.compute == "float32" and jax.default_backend() == "gpu":
        attention = "xla"  # the packed kernels take 16 bits
    model = bound(config, layout, attention)
    abstract = abstract_parameters(model, layout, jnp.dtype(config.precision.compute))
    check_room(abstract, layout)
    check_vocabulary(config, tokenizer.text_vocabulary)
    return LanguageModel(config, tokenizer, model, step, defaults, lambda: read(abstract))


def _for_use(config: RunConfig, overrides: Sequence[str]) -> tuple[RunConfig, Layout]:
    """Returns a configuration as a model is used and not trained, and its layout: on the devices that its
    mesh asks for, where an override is of the mesh, or on one."""
    meshed = any(word.startswith("mesh.") for word in overrides)
    devices = hardware.devices() if meshed else hardware.devices()[:1]
    mesh = config.mesh if meshed else MeshConfig()
    if not any(word.startswith("mesh.transfers=") for word in overrides):  # what a training step gained by
        mesh = dataclasses.replace(mesh, transfers="collectives")
    config = dataclasses.replace(
        config,
        mesh=mesh,
        train=dataclasses.replace(config.train, rows=len(devices), microbatches=1),
        data=dataclasses.replace(config.data, groups=None),
        model=dataclasses.replace(config.model, loop="unroll"),  # stacked layers are copied before their use
        precision=dataclasses.replace(config.precision, matmul="compute"),
        remat=RematConfig(policy="none"),
        offload=OffloadConfig(level="none"),
    )
    return config, validate(config, devices)


def check_room(abstract: Tree, layout: Layout) -> None:
    """Raises InputError where parameters alone are more than a device's memory, or a CPU's host's."""
    leaves = jax.tree.leaves(abstract)
    each = sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)
    device = layout.mesh.devices.flat[0]
    on_cpu = device.platform == "cpu"
    needed = each * layout.mesh.size if on_cpu else each
    room = hardware.host_limit_bytes() if on_cpu else (device.memory_stats() or {}).get("bytes_limit")
    if room and needed > room:
        said = (
            f"the parameters take {needed / 2**30:.1f} GiB, and {'this host' if on_cpu else 'a device'} has"
        )
        advice = "set precision.compute=bfloat16" if on_cpu else "set mesh.fsdp to more devices"
        raise InputError(f"{said} {room / 2**30:.1f} GiB; {advice}, or take a smaller model")
