"""MaxText's own training step, with cuDNN attention and its lightest rematerialisation: prints one JSON line.

    PYTHONPATH=scripts/bench:.:.mt python -m peers.maxtext --loop unroll|scan [--tokens FILE]

Of MaxText 0.2.5: the model, the loss, the optimizer, clipping and the compiled step, `train_step`; only the
loop around it is not its own. Where it is not installed, bring it in a folder:

    pip install --no-deps --target .mt maxtext==0.2.5 jaxtyping wadler-lindig omegaconf==2.3.0 \\
        antlr4-python3-runtime==4.9.3 jinja2 markupsafe \\
        pydantic==2.14.4 pydantic-core==2.50.5 annotated-types typing-inspection

Packages that it imports and that a training step does not call are stood in for where they are not installed.
Its `cudnn_flash_te` needs Transformer Engine, so that attention is `cudnn_flash_jax`, the same cuDNN kernel
by JAX. It has no check for values that are not finite, and none is added. Its step is compiled with cuBLAS's
matmuls alone, as ours, which is what scripts for GPUs have XLA_FLAGS say.
"""

import argparse
import importlib.abc
import importlib.machinery
import importlib.util
import itertools
import os
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import harness
import timed_loop

# Imported by MaxText, and called by no training step of these models.
STAND_INS = ("pathwaysutils", "aqt", "qwix", "tokamax", "drjax", "PIL", "tiktoken", "sentencepiece", "sympy")
STAND_INS += ("tensorboardX",)
REMAT = ("minimal_with_context", "minimal", "save_dot_with_context_except_mlp", "save_qkv_proj", "full")
POLICIES = {"unroll": ("none", *REMAT), "scan": REMAT}
"""MaxText's policies, the one that recomputes the least first. A scan recomputes whatever the policy does not
name, and with `none` everything."""
FULL = 0.97  # share of the device's memory that a compiled step may fill, as in jaxthru


class Attributes(type):
    """A class whose every attribute is a class that takes anything."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything


class Anything(metaclass=Attributes):
    """What an absent package's names stand for: it can be called, subclassed, and asked for more."""

    def __init__(self, *_, **__):
        pass

    def __call__(self, *_, **__) -> "Anything":
        return self


class Absent(types.ModuleType):
    """An absent package or a module of it."""

    __path__ = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules of the packages in STAND_INS, once no other finder has."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in STAND_INS:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return Absent(spec.name)

    def exec_module(self, module):
        pass


def settings(arguments: argparse.Namespace, remat: str, folder: str) -> dict[str, Any]:
    """Returns the values of MaxText's configuration that are not its defaults."""
    import jax

    shape, on_gpu = harness.Shape.of(arguments), jax.default_backend() == "gpu"
    rows, length = harness.rows_of(arguments).shape[1:]
    return {
        "base_emb_dim": shape.embed,
        "base_num_query_heads": shape.heads,
        "base_num_kv_heads": shape.kv_heads,
        "base_num_decoder_layers": shape.layers,
        "base_mlp_dim": shape.mlp,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocabulary,
        "logits_via_embedding": bool(shape.tied_embeddings),
        "normalize_embedding_logits": False,
        "decoder_block": "qwen3" if shape.qk_norm else "llama2",
        "use_qk_norm": bool(shape.qk_norm),
        "rope_max_timescale": int(shape.rope_theta),
        "normalization_layer_epsilon": shape.norm_epsilon,
        "attention": "cudnn_flash_jax" if on_gpu else "dot_product",
        "scan_layers": arguments.loop == "scan",
        "remat_policy": remat,
        "num_vocab_tiling": arguments.vocabulary_tiles,
        "dtype": "bfloat16",
        "weight_dtype": "float32",
        "opt_type": "adamw",
        "adam_b1": harness.BETAS[0],
        "adam_b2": harness.BETAS[1],
        "adam_eps": harness.EPSILON,
        "adam_weight_decay": harness.WEIGHT_DECAY,
        "gradient_clipping_threshold": harness.MAX_NORM,
        "learning_rate": harness.LEARNING_RATE,
        "steps": 1_000_000,
        "per_device_batch_size": rows,
        "max_target_length": length,
        "packing": False,
        "enable_dropout": False,
        "dataset_type": "synthetic",
        "skip_jax_distributed_system": True,
        "enable_checkpointing": False,
        "hardware": "gpu" if on_gpu else "cpu",
        "run_name": "bench",
        "base_output_directory": folder,
    }


class Program:
    """MaxText's step for one policy of rematerialisation: compiled before any state is there."""

    def __init__(self, arguments: argparse.Namespace, remat: str):
        import maxtext.configs
        from flax import nnx
        from maxtext.common import train_state_nnx
        from maxtext.configs import pyconfig
        from maxtext.utils import maxtext_utils, model_creation_utils, train_utils

        base, flags = Path(maxtext.configs.__file__).with_name("base.yml"), os.environ.get("XLA_FLAGS", "")
        with tempfile.TemporaryDirectory() as folder:
            values = settings(arguments, remat, folder)
            self.config = pyconfig.initialize(["", str(base)], **values)
        os.environ["XLA_FLAGS"] = flags  # it asks for dumps there, which nobody reads
        if remat == "none":  # which its parser makes None of, and its model takes that for `full`
            self.config._flat_config["remat_policy"] = remat
        self.remat, self.attention = remat, values["attention"]
        self.mesh = maxtext_utils.get_mesh_from_config(self.config, None)
        make, model = model_creation_utils.create_nnx_abstract_model(self.config, self.mesh, None)
        _, optimizer = train_utils.create_training_optimizer(self.config, model, mesh=self.mesh)

        def first():
            model = make()
            return train_state_nnx.TrainStateNNX(model, nnx.Optimizer(model, optimizer, wrt=nnx.Param))

        self.first = first

    def compile(self, batch: dict) -> Any:
        """Returns the compiled step, (state, batch) -> (state, metrics)."""
        import jax
        from flax import nnx
        from flax.core.spmd import logical_axis_rules
        from maxtext.trainers.pre_train.train import train_step
        from maxtext.utils import maxtext_utils, sharding, train_utils

        from jaxthru.runtime import xla

        with jax.set_mesh(self.mesh), logical_axis_rules(self.config.logical_axis_rules):
            abstract, _, shardings = maxtext_utils.get_abstract_state(
                self.config, self.mesh, self.first, True
            )
            graph = nnx.graphdef(nnx.eval_shape(self.first))
            of_parameters, shardings = sharding.maybe_update_params_sharding_with_opt(self.config, shardings)
            step, _ = train_utils.jit_train_and_eval_step(
                self.config, graph, self.mesh, abstract, shardings, train_step, params_shardings=of_parameters
            )
            self.shardings = shardings
            options = xla.for_matmuls(jax.default_backend(), loops=self.config.scan_layers)
            return step.lower(abstract, batch).compile(options)

    def state(self) -> Any:
        """Returns the state before the first update."""
        import jax
        from flax import nnx

        return jax.jit(lambda: nnx.state(self.first()), out_shardings=self.shardings)()


def lightest(arguments: argparse.Namespace, batch: dict) -> tuple[Program, Any]:
    """Returns the program of the first policy whose step fits the device as compiled, and that step."""
    import jax

    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", float("inf"))
    for remat in POLICIES[arguments.loop]:
        program = Program(arguments, remat)
        try:
            compiled = program.compile(batch)
        except jax.errors.JaxRuntimeError as error:  # some are found too large while they are compiled
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            continue
        sizes = compiled.memory_analysis()
        needed = sizes.argument_size_in_bytes + sizes.temp_size_in_bytes
        needed += sizes.output_size_in_bytes - sizes.alias_size_in_bytes
        print(f"remat_policy {remat}: {needed / 2**30:.1f} GiB as compiled", file=sys.stderr, flush=True)
        if needed <= FULL * limit:
            return program, compiled
    sys.exit("maxtext.py: no policy of rematerialisation fits the device")


def batches(arguments: argparse.Namespace) -> Iterator[dict]:
    """Yields MaxText's batches of causal rows, on the device."""
    import jax
    import numpy as np

    rows, made = harness.rows_of(arguments), []
    positions = np.tile(np.arange(rows.shape[2], dtype=np.int32), (rows.shape[1], 1))
    for tokens, targets, mask in itertools.islice(harness.causal_batches(rows), len(rows)):
        batch = {"inputs": tokens, "inputs_position": positions, "inputs_segmentation": np.ones_like(tokens)}
        batch |= {"targets": targets, "targets_position": positions}
        made.append(jax.device_put(batch | {"targets_segmentation": mask.astype(np.int32)}))
    return itertools.cycle(made)


def dispatcher(step: Callable, state: Any, of: Iterator[dict]) -> Callable[[], dict]:
    """Returns what starts the next step and returns its metrics."""
    kept = [state]

    def dispatch() -> dict:
        kept[0], metrics = step(kept[0], next(of))
        return {name: metrics["scalar"][f"learning/{name}"] for name in ("loss", "grad_norm")}

    return dispatch


def main() -> int:
    parser = harness.peer_parser(__doc__.splitlines()[0])
    parser.add_argument("--loop", choices=("unroll", "scan"), default="unroll")
    parser.add_argument("--vocabulary-tiles", type=int, default=1, help="its num_vocab_tiling")
    arguments = parser.parse_args()
    harness.need("jax", "maxtext", "pydantic", "omegaconf", "jaxtyping")
    harness.keep_stdout()  # MaxText prints
    sys.meta_path.append(StandIns())
    import jax

    from jaxthru.runtime import hardware, xla

    xla.configure()
    jax.config.update("jax_default_prng_impl", "unsafe_rbg")  # as its own command does
    of = batches(arguments)
    program, step = lightest(arguments, next(of))
    dispatch = dispatcher(step, program.state(), of)
    timing = timed_loop.timed(dispatch, jax.device_get, arguments.warmup_seconds, arguments.timed_seconds)
    size = harness.rows_of(arguments)[0].shape
    origin = harness.provenance()
    line = {
        **timing.line(size[0] * size[1]),
        "attention_span_per_token": size[1],
        "loss": [float(timing.values[0]["loss"]), float(timing.values[-1]["loss"])],
        "peak_hbm_bytes": hardware.peak_bytes(),
        "settings": {"loop": arguments.loop, "remat": program.remat, "attention": program.attention},
    }
    versions = harness.versions("maxtext", "jax", "jaxlib", "flax")
    harness.emit(line | {"device": origin["device"], "commit": origin["commit"], "versions": versions})
    return 0


if __name__ == "__main__":
    sys.exit(main())
