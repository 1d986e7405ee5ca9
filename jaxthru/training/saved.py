"""The parameters in a run's checkpoint, read alone: to use a model, or to export it.

Nothing is changed in the run directory, and any mesh, form of the layers and number of processes will do.
"""

import logging
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from jaxthru.runtime.errors import InputError, require
from jaxthru.runtime.sharding import Axes, Layout
from jaxthru.training import layout, orbax_settings
from jaxthru.training.checkpoint import saved_steps
from jaxthru.training.checksums import AnyPath, absolute, broken
from pallas_kernels.adamw_8bit.masters import join

log = logging.getLogger(__name__)
Tree = Any
REMAINDER = ("opt_state", "slots", "remainder")
"""Where a state keeps what makes its bfloat16 weights exact, see `optim.state = split_master`."""


class SavedParameters:
    """The parameters of one checkpoint. step: completed updates."""

    def __init__(self, checkpoints: AnyPath, step: int | None = None):
        """checkpoints: of a run directory. step: which; None is the newest that is whole.

        Raises InputError if there is none, or the one asked for is damaged.
        """
        orbax_settings.prepare(checkpoints)
        steps = saved_steps(checkpoints)
        require(bool(steps), f"{checkpoints.parent}: holds no checkpoint (checkpoint.every, checkpoint.last)")
        said = f"step {step}: no checkpoint of it in {checkpoints}; there are {', '.join(map(str, steps))}"
        require(step is None or step in steps, said)
        reasons = {}
        for tried in reversed(steps) if step is None else (step,):
            if (reason := broken(checkpoints / str(tried))) is None:
                break
            reasons[tried] = reason
            log.warning("checkpoint %d is damaged and passed over: %s", tried, reason)
        else:
            raise InputError(
                f"{checkpoints}: no checkpoint is whole: {reasons[steps[-1] if step is None else step]}"
            )
        self.step = tried
        self._directory = absolute(checkpoints) / f"{tried}/state"
        self._handler = ocp.PyTreeCheckpointHandler(use_compression=False)
        self._saved = self._handler.metadata(self._directory).tree

    def restore(self, abstract: Tree) -> Tree:
        """Returns the parameters. Raises InputError if the checkpoint is of another model.

        abstract: ShapeDtypeStructs with shardings, in the structure of `params`; what is saved in another
        dtype is cast.
        """
        wanted = layout.abstract_disk({"params": abstract})
        for path, like in _leaves(wanted):
            self._require(path, like.shape)
        return layout.from_disk(self._read(wanted), {"params": abstract})["params"]

    def master(self, path: tuple[str, ...], like: jax.ShapeDtypeStruct) -> jax.Array:
        """Returns one weight, exact in float32 if the run kept it so, and then in the dtype of `like`.

        path: its place on disk within `params`, see training/layout.py. like: shape, dtype and sharding.
        """
        self._require(("params", *path), like.shape)
        halves = [("params", *path)]
        if like.dtype == jnp.float32 and self._find((*REMAINDER, *path)) is not None:
            halves.append((*REMAINDER, *path))
        wanted: Tree = {}
        for place in halves:
            dtype = self._find(place).dtype if len(halves) > 1 else like.dtype
            layout.insert(wanted, place, jax.ShapeDtypeStruct(like.shape, dtype, sharding=like.sharding))
        disk = self._read(wanted)
        arrays = [layout.remove(disk, place) for place in halves]
        return jax.jit(join)(*arrays) if len(halves) > 1 else arrays[0]

    @property
    def exact(self) -> bool:
        """Says whether float32 has more of the weights than bfloat16 would."""
        tables = [leaf for path, leaf in _leaves(self._saved) if path[0] == "params" and len(leaf.shape) > 1]
        return self._find(REMAINDER) is not None or any(leaf.dtype == jnp.float32 for leaf in tables)

    def _read(self, wanted: Tree) -> Tree:
        restore_args = ocp.checkpoint_utils.construct_restore_args(wanted)
        arguments = ocp.args.PyTreeRestore(wanted, restore_args=restore_args, partial_restore=True)
        return self._handler.restore(self._directory, args=arguments)

    def _require(self, path: tuple[str, ...], shape: tuple[int, ...]) -> None:
        saved = self._find(path)
        name = "/".join(path)
        require(saved is not None, f"{self._directory.parent}: holds no {name}, which this model has")
        said = f"{self._directory.parent}: {name} is {list(saved.shape)}, this model's is {list(shape)}"
        require(tuple(saved.shape) == tuple(shape), said)

    def _find(self, path: tuple[str, ...]) -> Any:
        """Returns what lies at a place of the saved tree, None for nothing."""
        found = self._saved
        for name in path:
            found = found.get(name) if isinstance(found, dict) else None
        return found


def abstract_parameters(model: Any, layout_: Layout, matrices: jnp.dtype) -> Tree:
    """Returns the shapes, dtypes and shardings of a model's parameters as they are used and not trained:
    matrices and tables as given, norms and biases float32. model: an `engine.model.Model`."""
    shapes = jax.eval_shape(model.init, jax.random.key(0))

    def sharded(info: Any, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        axes: Axes = info.axes
        dtype = matrices if info.decays else jnp.float32
        return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=layout_.sharding(axes))

    return jax.tree.map(sharded, model.weights, shapes)


def _leaves(tree: Tree) -> list[tuple[tuple[str, ...], Any]]:
    """Returns (place, leaf) of each array."""
    flat = jax.tree_util.tree_flatten_with_path(tree)[0]
    return [(tuple(layout.key_name(key) for key in path), leaf) for path, leaf in flat]
