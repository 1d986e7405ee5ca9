"""The KV cache: keys and values of the tokens before, and attention over them.

Rows of a batch end together: a prompt of any length lies so that its last token is at the same time as
everyone's, the length of the longest (padded) prompt less one, and from there on all rows take one step at a
time. Where in the cache a token is written is then one number for all rows, and the write one slice in
place. What differs is the time at which each row began: its keys from before are not its own, and are masked.

A cache of R slots is a ring: the token of time t lies in slot t mod R. With as many slots as the batch has
times that is a plain list; a layer with a window needs no more slots than its window has tokens.

Shapes: B rows, T tokens, H query heads, K kv heads, G = H / K query heads to a kv head, C head_dim, R slots,
L stacked layers.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxthru.models.ops import Ops
from pallas_kernels.attention import Segments

AXES = ("batch", "kv_heads", None, "head_dim")


class Cache(NamedTuple):
    """Of one call of attention, in its dtype: [B, K, R, C] each, or [L, B, K, R, C] of stacked layers. Rows
    and heads come first, so that a head's keys are one matrix."""

    keys: jax.Array
    values: jax.Array


class Time(NamedTuple):
    """now: int32, of the newest token. began: int32 [B], of each row's first token."""

    now: jax.Array
    began: jax.Array

    def of_slots(self, slots: int) -> jax.Array:
        """Returns the time of the token in each of so many slots of a ring, int32 [R]; below 0 there is
        none."""
        return self.now - (self.now - jnp.arange(slots, dtype=jnp.int32)) % slots


@dataclasses.dataclass
class Capture:
    """Attention of a block during the prefill: the model's own, of which keys and values are kept.

    slots: of a cache without a window. lengths_B: of the prompts. caches: of each call, in their order.
    """

    ops: Ops
    slots: int
    lengths_B: jax.Array
    caches: list[Cache] = dataclasses.field(default_factory=list)

    def __call__(
        self, q_BTHC: jax.Array, k_BTKC: jax.Array, v_BTKC: jax.Array, segments: Segments, window: int | None
    ) -> jax.Array:
        """Returns [B, T, H, C], as `Context.attend`."""
        slots = self.slots if window is None else min(self.slots, window)
        self.caches.append(Cache(*(self._kept(each, slots) for each in (k_BTKC, v_BTKC))))
        return self.ops.attention(q_BTHC, k_BTKC, v_BTKC, segments, window)

    def _kept(self, x_BTKC: jax.Array, slots: int) -> jax.Array:
        """Returns [B, K, R, C]: the last tokens of each row, in the slots of their times. A slot of none has
        some token's, which is masked, or overwritten, before it is seen."""
        length = x_BTKC.shape[1]
        time = Time(jnp.int32(length - 1), length - self.lengths_B)
        at_BR = jnp.clip(time.of_slots(slots)[None] - time.began[:, None], 0, length - 1)
        kept_BRKC = jnp.take_along_axis(x_BTKC, at_BR[:, :, None, None], axis=1)
        return self.ops.constrain(kept_BRKC.swapaxes(1, 2), *AXES)


@dataclasses.dataclass
class Cached:
    """Attention of a block to its caches, of one new token a row, which is written to them first.

    layer: of stacked ones, its index. called: how often it was.
    """

    ops: Ops
    caches: list[Cache]
    time: Time
    layer: jax.Array | None = None
    called: int = 0

    def __call__(
        self, q_B1HC: jax.Array, k_B1KC: jax.Array, v_B1KC: jax.Array, segments: Segments, window: int | None
    ) -> jax.Array:
        """Returns [B, 1, H, C], as `Context.attend`. window: the cache has no more slots than that."""
        before = self.caches[self.called]
        cache = Cache(self._written(before.keys, k_B1KC), self._written(before.values, v_B1KC))
        self.caches[self.called] = cache
        self.called += 1
        keys, values = cache if self.layer is None else (each[self.layer] for each in cache)
        seen_BR = self.time.of_slots(keys.shape[2])[None] >= self.time.began[:, None]
        return self.ops.constrain(attention(q_B1HC, keys, values, seen_BR), "batch", None, "heads", None)

    def _written(self, cache: jax.Array, x_B1KC: jax.Array) -> jax.Array:
        new_BK1C = x_B1KC.swapaxes(1, 2)
        slot = self.time.now % cache.shape[-2]
        if self.layer is None:
            return jax.lax.dynamic_update_slice_in_dim(cache, new_BK1C, slot, axis=2)
        return jax.lax.dynamic_update_slice(cache, new_BK1C[None], (self.layer, 0, 0, slot, 0))


def attention(q_B1HC: jax.Array, k_BKRC: jax.Array, v_BKRC: jax.Array, seen_BR: jax.Array) -> jax.Array:
    """Returns [B, 1, H, C]: attention of one token a row to the slots that it sees, by a float32 softmax with
    the scale C**-0.5. The keys of a kv head are read once for all of its query heads."""
    rows, _, heads, width = q_B1HC.shape
    q_BKGC = q_B1HC.reshape(rows, k_BKRC.shape[1], -1, width)
    # GPUs and TPUs by default multiply float32 matrices in fewer bits.
    how = {"precision": "highest" if q_B1HC.dtype == jnp.float32 else None}
    how |= {"preferred_element_type": jnp.float32}
    scores_BKGR = jnp.einsum("bkgc,bkrc->bkgr", q_BKGC, k_BKRC, **how) * width**-0.5
    weights_BKGR = jax.nn.softmax(jnp.where(seen_BR[:, None, None], scores_BKGR, -jnp.inf), axis=-1)
    o_BKGC = jnp.einsum("bkgr,bkrc->bkgc", weights_BKGR.astype(v_BKRC.dtype), v_BKRC, **how)
    return o_BKGC.astype(q_B1HC.dtype).reshape(rows, 1, heads, width)
