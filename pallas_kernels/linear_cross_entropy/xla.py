"""Linear cross-entropy in chunks of tokens, with the gradients formed along with the loss.

The objective is a sum of the tokens' losses with known weights. So as soon as a chunk's logits are there,
their gradient is too, but for the one factor that the backward pass brings. The logits are computed once and
are gone before the next chunk's: three matmuls in all, where computing the logits again in the
backward pass would take four.

Shapes: B rows, T tokens, N = B·T, C tokens of a chunk, P chunks, D embed, V vocabulary (this device's part).
The matrix is [D, V] or [V, D].
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.dot import dot
from pallas_kernels.varying import vary_alike

# A chunk's logits take at most this much, and their gradient as much again: XLA does not write it over them.
# Each chunk but the first reads and writes the matrix's whole float32 gradient, which makes large chunks
# cheap: 8 of 2,048 tokens for 16,384 tokens and a vocabulary of 128,256 in bfloat16.
LOGITS_BYTES = 512 << 20

TILE = 128  # a chunk is a multiple of what matrix units take at once


def logits_gradient(logits_CV, log_z_C, targets_C, weights_C, z_loss: float) -> jax.Array:
    """Returns the gradient of a chunk's objective, [C, V] of the logits' dtype.

    The logits are not read again after it. targets_C: [C] int32, in this device's columns where they are in
    its part at all. log_z_C, weights_C: [C] float32.
    """
    p_CV = jnp.exp(logits_CV.astype(jnp.float32) - log_z_C[:, None])
    chosen_CV = _chosen(logits_CV, targets_C).astype(jnp.float32)
    d_logits_CV = weights_C[:, None] * ((1 + 2 * z_loss * log_z_C)[:, None] * p_CV - chosen_CV)
    # Two matmuls read it: it is to be written once, and not made anew within either of them.
    return jax.lax.optimization_barrier(d_logits_CV.astype(logits_CV.dtype))


def losses_and_gradient(
    logits_CV, targets_C, weights_C, z_loss: float, axis_name, logits_gradient=logits_gradient
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns each token's cross-entropy and log(Z), and the gradient of a chunk's objective, [C, V] of the
    logits' dtype.

    The logits are not read again after it. logits_gradient: forms the gradient, as the function of this name
    does.
    """
    losses_C, log_z_C, targets_C = _losses_of(logits_CV, targets_C, axis_name)
    # The losses come first: the logits may be gone once their gradient is there.
    losses_C, log_z_C = jax.lax.optimization_barrier((losses_C, log_z_C))
    return losses_C, log_z_C, logits_gradient(logits_CV, log_z_C, targets_C, weights_C, z_loss)


def logits_bytes(of_all: int, chunk_bytes: int | None) -> int:
    """Returns what a chunk's logits take at most. of_all: bytes of all tokens' logits. chunk_bytes: of theirs
    and their gradient's, where it is given."""
    return LOGITS_BYTES if chunk_bytes is None else chunk_bytes // 2


def linear_cross_entropy(
    hidden_BTD,
    matrix,
    targets_BT,
    weights_BT,
    *,
    z_loss,
    layout,
    axis_name,
    weighted_only,
    chunk_bytes,
    losses_and_gradient=losses_and_gradient,
    logits_bytes=logits_bytes,
):
    """Returns (objective, losses [B, T], log(Z) [B, T]); see `linear_cross_entropy` of the package.

    losses_and_gradient, logits_bytes: what the functions of these names do.
    """
    B, T, D = hidden_BTD.shape
    hidden_BTD, matrix = vary_alike(hidden_BTD, matrix)
    d_dim = layout.index("D")
    V, itemsize = matrix.shape[1 - d_dim], hidden_BTD.dtype.itemsize
    C = chunk_length(B * T, V, itemsize, logits_bytes(B * T * V * itemsize, chunk_bytes))
    objective, losses_N, log_z_N = _losses(
        hidden_BTD.reshape(B * T, D),
        matrix,
        targets_BT.reshape(-1),
        weights_BT.reshape(-1),
        z_loss,
        C,
        d_dim,
        axis_name,
        weighted_only,
        losses_and_gradient,
    )
    return objective, losses_N.reshape(B, T), log_z_N.reshape(B, T)


def chunk_length(tokens: int, vocabulary: int, itemsize: int, logits_bytes: int) -> int:
    """Returns C: all tokens if they fit, else a multiple of TILE. itemsize: bytes of a logit."""
    return min(tokens, max(logits_bytes // (vocabulary * itemsize) // TILE, 1) * TILE)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6, 7, 8, 9))
def _losses(
    hidden_ND, matrix, targets_N, weights_N, z_loss, C, d_dim, axis_name, weighted_only, losses_and_gradient
):
    matrix = matrix.astype(hidden_ND.dtype)

    def one_chunk(_, chunk):
        hidden_CD, targets_C, _ = chunk
        return None, _losses_of(dot(hidden_CD, matrix, 1, d_dim), targets_C, axis_name)[:2]

    over = _over_weighted if weighted_only else _over_all
    _, (losses_N, log_z_N) = over(one_chunk, None, C, hidden_ND, targets_N, weights_N)
    return _objective(losses_N, log_z_N, weights_N, z_loss), losses_N, log_z_N


def _forward(
    hidden_ND, matrix, targets_N, weights_N, z_loss, C, d_dim, axis_name, weighted_only, losses_and_gradient
):
    stored, matrix = matrix.dtype, matrix.astype(hidden_ND.dtype)

    def one_chunk(d_matrix, chunk):
        hidden_CD, targets_C, weights_C = chunk
        losses_C, log_z_C, d_logits_CV = losses_and_gradient(
            dot(hidden_CD, matrix, 1, d_dim), targets_C, weights_C, z_loss, axis_name
        )
        d_hidden_CD = dot(d_logits_CV, matrix, 1, 1 - d_dim)
        pair = (hidden_CD, d_logits_CV) if d_dim == 0 else (d_logits_CV, hidden_CD)
        # The sum in float32, in the form of a matmul that adds to its output in place.
        d_matrix = d_matrix + dot(*pair, 0, 0, jnp.float32)
        return d_matrix, (losses_C, log_z_C, d_hidden_CD)

    nothing = jnp.zeros_like(matrix, dtype=jnp.float32)
    over = _over_weighted if weighted_only else _over_all
    d_matrix, (losses_N, log_z_N, d_hidden_ND) = over(one_chunk, nothing, C, hidden_ND, targets_N, weights_N)
    objective = _objective(losses_N, log_z_N, weights_N, z_loss)
    return (objective, losses_N, log_z_N), (d_hidden_ND, d_matrix.astype(stored))


def _over_all(one_chunk, total, C: int, *arrays):
    """Returns the total over all chunks, and what is made of each token, [N, ...].

    one_chunk: (total so far, (hidden [C, D], targets [C], weights [C])) -> (total, arrays [C, ...]). The
    first, of what other chunks leave over, is outside of the loop: there XLA drops the sum with zeros.
    """
    N = len(arrays[0])
    others = -(-N // C) - 1
    first = N - others * C

    def step(chunk, state):
        total, parts = state
        begin = first + chunk * C
        total, made = one_chunk(total, [jax.lax.dynamic_slice_in_dim(x, begin, C) for x in arrays])
        return total, _put(parts, made, begin)

    total, made = one_chunk(total, [x[:first] for x in arrays])
    if not others:
        return total, made
    # The next chunk waits for this one's logits to be gone: of two chunks XLA has no loop to keep them apart.
    total, arrays = jax.lax.optimization_barrier((total, arrays))
    parts = [jnp.pad(x, [(0, N - first)] + [(0, 0)] * (x.ndim - 1)) for x in made]
    return jax.lax.fori_loop(0, others, step, (total, parts))


def _put(parts, made, begin):
    """Returns the arrays [N, ...] with a chunk's, [C, ...], from `begin` on."""
    return [jax.lax.dynamic_update_slice_in_dim(*pair, begin, 0) for pair in zip(parts, made, strict=True)]


def _over_weighted(one_chunk, total, C: int, hidden_ND, targets_N, weights_N):
    """Returns the same over the tokens alone whose weight is not 0; of the others zeros.

    They are brought together, and the loop ends with their last chunk: how many there are is known only when
    it runs, and each device of a mesh has a count of its own. Those that share a vocabulary have the same
    tokens, so they go around equally often.
    """
    N = len(targets_N)
    P = -(-N // C)
    counts_N = weights_N != 0
    order = jnp.pad(jnp.argsort(~counts_N, stable=True), (0, P * C - N), constant_values=N)  # N is no place
    chunks = (jnp.sum(counts_N, dtype=jnp.int32) + C - 1) // C

    def chunk_at(begin):
        places_C = jax.lax.dynamic_slice_in_dim(order, begin, C)
        take = lambda x: x.at[places_C].get(mode="fill", fill_value=0)  # noqa: E731
        hidden_CD, targets_C, weights_C = map(take, (hidden_ND, targets_N, weights_N))
        return jnp.where(weights_C[:, None] != 0, hidden_CD, 0), targets_C, weights_C

    def empty(made):
        zeros = jnp.zeros((P * C, *made.shape[1:]), made.dtype)
        axes = tuple(sorted(made.manual_axis_type.varying))
        return jax.lax.pcast(zeros, axes, to="varying") if axes else zeros

    def step(chunk, state):
        total, parts = state
        total, made = one_chunk(total, chunk_at(chunk * C))
        return total, _put(parts, made, chunk * C)

    # A trace, because shapes alone do not say over which mesh axes a result varies.
    made = jax.make_jaxpr(lambda total: one_chunk(total, chunk_at(0))[1])(total).out_avals
    total, parts = jax.lax.fori_loop(0, chunks, step, (total, list(map(empty, made))))
    place_N = jnp.maximum(jnp.cumsum(counts_N) - 1, 0)  # where each was brought

    def by_token(part):
        return jnp.where(counts_N.reshape(-1, *(1,) * (part.ndim - 1)), part[place_N], 0)

    return total, jax.tree.map(by_token, parts)


def _backward(z_loss, C, d_dim, axis_name, weighted_only, losses_and_gradient, residuals, cotangents):
    scale = cotangents[0]  # those of the tokens' losses and log(Z) are none of ours
    d_hidden_ND, d_matrix = ((scale * x.astype(jnp.float32)).astype(x.dtype) for x in residuals)
    return d_hidden_ND, d_matrix, None, None


_losses.defvjp(_forward, _backward)


def _losses_of(logits_CV, targets_C, axis_name):
    """Returns each token's cross-entropy and log(Z), and the targets in this device's columns."""
    logits32_CV = logits_CV.astype(jnp.float32)
    if axis_name is not None:
        targets_C = targets_C - jax.lax.axis_index(axis_name) * logits_CV.shape[1]
    target_C = jnp.sum(jnp.where(_chosen(logits_CV, targets_C), logits32_CV, 0.0), axis=1)
    log_z_C = jax.nn.logsumexp(logits32_CV, axis=1)
    if axis_name is not None:
        top_C = jax.lax.pmax(log_z_C, axis_name)
        z_C, target_C = jax.lax.psum(jnp.stack([jnp.exp(log_z_C - top_C), target_C]), axis_name)
        log_z_C = top_C + jnp.log(z_C)
    return log_z_C - target_C, log_z_C, targets_C


def _chosen(logits_CV, targets_C):
    """Returns which logits are the targets', [C, V]. A comparison, which fuses into the passes over the
    logits; not a gather and a scatter."""
    return jax.lax.broadcasted_iota(jnp.int32, logits_CV.shape, 1) == targets_C[:, None]


def _objective(losses_N, log_z_N, weights_N, z_loss):
    return jnp.sum(weights_N * (losses_N + z_loss * jnp.square(log_z_N)))
