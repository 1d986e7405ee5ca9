"""AdamW and Muon, composed of Optax transformations, on weights and state in several number formats."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from jaxthru.optim import shards
from jaxthru.optim.formats import FORMATS, Format, Slot, decode, encode
from jaxthru.runtime.errors import require
from jaxthru.runtime.sharding import Layout
from jaxthru.runtime.weights import WeightInfo
from pallas_kernels.adamw_8bit import Adam, Scalars, join, round_stochastically, split

Tree = Any
SLOTS = ("mu", "nu", "remainder")
SLOWEST_AVERAGE = {"float32": 1.0, "bfloat16": 0.99, "int8": 0.99}
"""The largest b2 for second moments so kept. An average that falls by 1 - b2 in a step never falls if that is
less than half a unit of its format, and updates would only ever shrink."""


@dataclasses.dataclass(frozen=True)
class OptimConfig:
    """name: `adamw`, with decoupled weight decay (Loshchilov & Hutter, arXiv:1711.05101). `muon`: the blocks'
        linear layers by orthogonalised momentum (Jordan 2024, https://kellerjordan.github.io/posts/muon),
        scaled to the size of AdamW's updates (arXiv:2502.16982) so that both take one learning rate and
        weight decay; embedding, LM head and norms by AdamW.
    learning_rate: the peak, reached at the end of the warm-up.
    schedule: `cosine` warms up, then decays to `final_ratio` of the peak over the rest of the run;
        `wsd` warms up, stays, and decays linearly over the last `decay_ratio` of the run
        (warm-up-stable-decay, arXiv:2404.06395); `constant` warms up and stays.
    schedule_steps: steps that the schedule spans; None is train.steps. After them the last value is held.
    warmup_ratio: share of the schedule's steps in which the learning rate rises to its peak.
    decay_ratio: share of the schedule's steps in which `wsd` decays.
    final_ratio: learning rate at the end of `cosine` and `wsd`, as a share of the peak.
    b1: decay rate of AdamW's first moment. b2: decay rate of AdamW's second moment. epsilon: added to the
        root of AdamW's second moment. momentum: decay rate of Muon's momentum.
    weight_decay: applies to matrices and embeddings, never to norms and biases.
    clip: bound on the global gradient norm; 0 is off. clip_rule: `exact` scales by this step's own norm,
        `previous` by that of the last step that was not skipped, which is known before the gradients are;
        the first step only measures it and updates nothing. Where norms differ much from step to step, as
        early in training, `previous` costs loss.
    state: number formats of the weights, their masters and the moments, by a name in optim/formats.py;
        docs/memory.md says what they cost. `auto` takes `split_master_float32` on NVIDIA GPUs in bfloat16
        and FP8 under AdamW, where steps are faster by it, and else `float32` (build/state_choice.py): both
        keep every bit of the masters and the moments. A run keeps what was taken, wherever it goes on.
    """

    name: Literal["adamw", "muon"] = "adamw"
    learning_rate: float = 3e-4
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    schedule_steps: int | None = None
    warmup_ratio: float = 0.02
    decay_ratio: float = 0.2
    final_ratio: float = 0.1
    b1: float = 0.9
    b2: float = 0.95
    epsilon: float = 1e-8
    momentum: float = 0.95
    weight_decay: float = 0.1
    clip: float = 1.0
    clip_rule: Literal["exact", "previous"] = "exact"
    state: Literal[
        "auto",
        "float32",
        "bfloat16",
        "int8",
        "split_master_float32",
        "split_master",
        "split_master_int8",
        "stochastic_rounding",
    ] = "auto"

    @property
    def format(self) -> Format:
        """The formats of matrices; of `auto`, which is open until a step is built, those of `float32`."""
        return FORMATS.get(self.state, FORMATS["float32"])  # names are checked with all other keys

    def __post_init__(self):
        require(self.learning_rate > 0, f"optim.learning_rate = {self.learning_rate}: must be above 0")
        span = self.schedule_steps
        require(span is None or span >= 1, f"optim.schedule_steps = {span}: must be at least 1")
        for name in ("warmup_ratio", "decay_ratio", "final_ratio"):
            value = getattr(self, name)
            require(0 <= value <= 1, f"optim.{name} = {value}: must lie between 0 and 1")
        require(
            self.schedule != "wsd" or self.warmup_ratio + self.decay_ratio <= 1,
            f"optim.warmup_ratio + optim.decay_ratio = {self.warmup_ratio + self.decay_ratio}: at most 1",
        )
        for name in ("b1", "b2", "momentum"):
            value = getattr(self, name)
            require(0 <= value < 1, f"optim.{name} = {value}: must be at least 0 and below 1")
        for name in ("weight_decay", "clip"):
            value = getattr(self, name)
            require(value >= 0, f"optim.{name} = {value}: must be at least 0")
        require(self.epsilon > 0, f"optim.epsilon = {self.epsilon}: must be above 0")
        require(
            self.clip_rule == "exact" or self.clip > 0,
            f"optim.clip_rule = {self.clip_rule!r}: needs optim.clip above 0, which is {self.clip}",
        )
        moments = self.format.moments
        require(
            self.b2 <= SLOWEST_AVERAGE[moments],
            f"optim.b2 = {self.b2}: at most {SLOWEST_AVERAGE[moments]} with the {moments} moments of "
            f"optim.state = {self.state!r}; slower averages need a state with float32 moments",
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Optimizer:
    """Updates parameters, all at once or any sub-tree of them, with one result.

    infos: in the structure of the parameters, what each is: a WeightInfo.
    adamw_8bit: the implementation of `pallas_kernels.adamw_8bit`; None takes the first that can run. layout:
        of several devices that each run it on what they have, see `shards.update`.

    Slots are {"mu": tree, "nu": tree, "remainder": tree}, each in the structure of the parameters: the
    first and second moment (see `formats.Slot`) and what makes a bfloat16 weight its float32 master. Where a
    parameter has no such slot, the tree holds None.
    """

    config: OptimConfig
    infos: Tree
    adamw_8bit: str | None = None
    layout: Layout | None = None

    def init(self, params: Tree) -> tuple[Tree, Tree]:
        """Returns the weights as they are kept, and {"count": updates made (int32), "slots": slots}.

        params: float32, the whole tree.
        """
        weights, slots = self.init_stage(params, self.infos)
        return weights, {"count": jnp.zeros((), jnp.int32), "slots": slots}

    def init_stage(self, params: Tree, infos: Tree) -> tuple[Tree, dict[str, Tree]]:
        """Returns the weights and slots of any sub-tree of the parameters. infos: the same sub-tree of
        `self.infos`."""
        leaves, tree = jax.tree.flatten(params)
        # Behind a barrier: XLA else encodes zeros as it compiles, on one core, and keeps them in the program:
        # for a 14B model's 8-bit moments that took 16 s and several arrays of 3 GB.
        zero = jax.lax.optimization_barrier(jnp.zeros((), jnp.float32))
        kept = []
        for leaf, info in zip(leaves, tree.flatten_up_to(infos), strict=True):
            zeros = jnp.broadcast_to(zero.astype(leaf.dtype), leaf.shape)
            kept.append(self._keep(leaf, zeros, zeros, info, None))
        return _unzip(tree, kept)

    def clip_scale(self, norm: jax.Array) -> jax.Array:
        """Returns what gradients of this global norm are to be divided by: 1 where they need no clipping."""
        if not self.config.clip:
            return jnp.ones((), jnp.float32)
        return jnp.maximum(norm / self.config.clip, 1.0)

    def clipping(self, norm: jax.Array, previous: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns what gradients are to be divided by, and whether they can be used: under clip_rule
        `previous` not before there is a norm.

        norm: of this step's gradients. previous: `grad_norm` of the state.
        """
        if self.config.clip_rule == "exact":
            return self.clip_scale(norm), jnp.ones((), bool)
        return self.clip_scale(previous), previous > 0

    def update(
        self,
        gradients: Tree,
        weights: Tree,
        slots: dict[str, Tree],
        *,
        count: jax.Array,
        learning_rate: jax.Array,
        clip_scale: jax.Array,
        finite: jax.Array,
        infos: Tree,
        key: jax.Array | None = None,
    ) -> tuple[Tree, dict[str, Tree]]:
        """Returns the next weights and slots of any sub-tree of the parameters.

        Args:
          gradients: of any float dtype; the arithmetic is float32.
          count: updates made before this one, int32.
          learning_rate: the schedule at `count`.
          clip_scale: as from `clip_scale`.
          finite: a bool; where it is False, weights and slots come back as they were.
          infos: the same sub-tree of `self.infos`; what does not train has None for a gradient.
          key: `formats.rounding_key` of the sub-tree; only optim.state = stochastic_rounding needs one.

        Raises ValueError without the key that is needed.
        """
        if key is None and self.config.format.master == "none":
            raise ValueError(f"optim.state = {self.config.state!r}: an update needs a key to round with")
        leaves, tree = jax.tree.flatten(weights)
        columns = [tree.flatten_up_to(each) for each in (gradients, infos, *(slots[n] for n in SLOTS))]
        updated = []
        for index, (weight, gradient, info, mu, nu, remainder) in enumerate(
            zip(leaves, *columns, strict=True)
        ):
            if not info.trains:
                updated.append((weight, None, None, None))
                continue
            leaf_key = None if key is None else jax.random.fold_in(key, index)
            if self._in_8_bits(info):
                scalars = self._scalars(count, learning_rate, clip_scale, finite)
                given = gradient, weight, remainder, mu, nu
                updated.append(self._step_8bit(info, given, leaf_key, scalars))
                continue
            master = join(weight, remainder) if remainder is not None else weight.astype(jnp.float32)
            moments = [None if slot is None else decode(slot) for slot in (mu, nu)]
            new = self._step(
                gradient.astype(jnp.float32) / clip_scale, master, *moments, info, count, learning_rate
            )
            updated.append(
                jax.tree.map(
                    lambda new, old: jnp.where(finite, new, old),
                    self._keep(*new, info, leaf_key),
                    (weight, mu, nu, remainder),
                )
            )
        return _unzip(tree, updated)

    def _scalars(self, count, learning_rate, clip_scale, finite) -> Scalars:
        updates = (count + 1).astype(jnp.float32)
        biases = (1 - beta**updates for beta in (self.config.b1, self.config.b2))
        return Scalars(clip_scale, learning_rate, *biases, finite)

    def _step_8bit(self, info: WeightInfo, given: shards.State, key, scalars: Scalars) -> tuple:
        """Returns what `_keep` returns, after one update of one parameter."""
        config = self.config
        adam = Adam(config.b1, config.b2, config.epsilon, config.weight_decay)
        key = key if config.format.master == "none" else None
        updated = shards.update(self.layout, info.axes, given, key, scalars, adam, self.adamw_8bit)
        weight, remainder, mu, nu = updated
        return weight, mu, nu, remainder

    def _step(self, gradient, master, mu, nu, info: WeightInfo, count, learning_rate) -> tuple:
        """Returns (master, mu, nu) after one update of one parameter, all in float32."""
        config = self.config
        if self._orthogonalised(info):
            dims = optax.contrib.MuonDimensionNumbers(info.inputs, info.outputs)
            rule = optax.contrib.scale_by_muon(beta=config.momentum, weight_dimension_numbers=dims)
            sides = (math.prod(gradient.shape[dim] for dim in side) for side in (dims[0], dims[1]))
            size = MUON_SIZE * math.sqrt(max(sides))
            state = rule.init(gradient)._replace(count=count, mu=mu)
        else:
            rule, size = optax.scale_by_adam(config.b1, config.b2, config.epsilon), None
            state = rule.init(gradient)._replace(count=count, mu=mu, nu=nu)
        direction, state = standard_promotion(rule.update)(gradient, state)
        if size is not None:
            direction = size * direction
        if info.decays:
            direction = direction + config.weight_decay * master
        return master + -learning_rate * direction, state.mu, getattr(state, "nu", None)

    def _keep(
        self, master, mu, nu, info: WeightInfo, key
    ) -> tuple[jax.Array, Slot | None, Slot | None, jax.Array | None]:
        """Returns (weight, mu, nu, remainder) of one parameter as they are kept."""
        format = self._format(info)
        if not info.trains:
            number = jnp.issubdtype(master.dtype, jnp.integer)  # as a seed
            return master if info.in_base or number else master.astype(format.weights), None, None, None
        weight, remainder = master, None
        if format.master == "split":
            weight, remainder = split(master)
        elif format.master == "none":
            # The first weights are the nearest: there is no update yet that could get lost.
            weight = master.astype(jnp.bfloat16) if key is None else round_stochastically(master, key)
        mu = encode(format.moments, mu, "signed")
        nu = None if self._orthogonalised(info) else encode(format.moments, nu, "unsigned")
        return weight, mu, nu, remainder

    def _format(self, info: WeightInfo) -> Format:
        return self.config.format if info.decays else FORMATS["float32"]

    def _in_8_bits(self, info: WeightInfo) -> bool:
        return self._format(info).moments == "int8" and not self._orthogonalised(info)

    def _orthogonalised(self, info: WeightInfo) -> bool:
        return self.config.name == "muon" and info.role == "matrix"


MUON_SIZE = 0.2
"""The root mean square of Muon's updates, about that of AdamW's (arXiv:2502.16982, section 2.2)."""


def _unzip(tree: Any, leaves: list[tuple]) -> tuple[Tree, dict[str, Tree]]:
    """Returns weights and slots as trees, of (weight, *slots) for each parameter."""
    columns = zip(*leaves, strict=True) if leaves else [()] * (1 + len(SLOTS))
    weights, *slots = map(tree.unflatten, columns)
    return weights, dict(zip(SLOTS, slots, strict=True))


def standard_promotion(function: Callable) -> Callable:
    """Optax relies on standard promotion (float ** int32), which strict settings refuse."""

    @functools.wraps(function)
    def wrapped(*arguments):
        with jax.numpy_dtype_promotion("standard"):
            return function(*arguments)

    return wrapped
