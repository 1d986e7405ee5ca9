"""Sampling: how the next token is chosen of a model's logits.

Shapes: B rows, V vocabulary.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxthru.runtime.errors import require


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Temperature first, then top_k, then top_p, each as transformers defines it.

    temperature: divides the logits; 0 takes the likeliest token, whatever the other keys say.
    top_k: draws of the so many likeliest tokens; 0 is of all.
    top_p: draws of the likeliest tokens that together have at least this probability; 1 is of all, and one
        is always left.
    seed: of the draws, which depend on it, the row in its batch and the number of the token alone: the same
        prompt gives the same text by itself and as the first of several.
    max_tokens: generated for a prompt; fewer where a stop token ends it.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    max_tokens: int = 128

    def __post_init__(self):
        require(self.temperature >= 0, f"temperature = {self.temperature}: must be at least 0")
        said = f"top_k = {self.top_k}: must be at least 0, which takes all tokens, and below 2**31"
        require(0 <= self.top_k < 2**31, said)
        require(0 < self.top_p <= 1, f"top_p = {self.top_p}: must be above 0 and at most 1")
        require(0 <= self.seed < 2**32, f"seed = {self.seed}: must be at least 0 and below 2**32")
        require(self.max_tokens >= 1, f"max_tokens = {self.max_tokens}: must be at least 1")

    @property
    def rule(self) -> str:
        """What a program is compiled for: `greedy`, `all` or, where tokens must be sorted, `likeliest`."""
        if self.temperature == 0 or self.top_k == 1:
            return "greedy"
        return "likeliest" if self.top_k or self.top_p < 1 else "all"

    @property
    def values(self) -> dict[str, np.ndarray]:
        """What a program is given."""
        return {
            "temperature": np.float32(self.temperature),
            "top_k": np.int32(self.top_k),
            "top_p": np.float32(self.top_p),
            "seed": np.uint32(self.seed),
        }


def likeliest(logits_BV: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    """Returns the logits with -inf in place of those that `Sampling.top_k`, then `top_p`, leave out.

    Tokens of equal logits stay or go together.
    """
    vocabulary = logits_BV.shape[1]
    sorted_BV = jax.lax.sort(logits_BV, dimension=1)[:, ::-1]
    last = jnp.where(top_k == 0, vocabulary, jnp.minimum(top_k, vocabulary)) - 1
    least_B = jax.lax.dynamic_index_in_dim(sorted_BV, last, axis=1, keepdims=True)
    sorted_BV = jnp.where(sorted_BV >= least_B, sorted_BV, -jnp.inf)
    share_BV = jax.nn.softmax(sorted_BV, axis=1)
    # A token stays unless those before it have the probability already; of the first, nothing is before it.
    before_BV = jnp.cumsum(share_BV, axis=1) - share_BV
    stays_BV = (before_BV < top_p) & (sorted_BV > -jnp.inf)
    least_B = jnp.min(jnp.where(stays_BV, sorted_BV, jnp.inf), axis=1, keepdims=True)
    return jnp.where(logits_BV >= least_B, logits_BV, -jnp.inf)


def choose(logits_BV: jax.Array, step: jax.Array, rule: str, values: dict[str, jax.Array]) -> jax.Array:
    """Returns each row's next token, int32 [B]. step: the number of the token. rule, values: of Sampling."""
    if rule == "greedy":
        return jnp.argmax(logits_BV, axis=1).astype(jnp.int32)
    logits_BV = logits_BV / values["temperature"]
    if rule == "likeliest":
        logits_BV = likeliest(logits_BV, values["top_k"], values["top_p"])
    key = jax.random.key(values["seed"])

    def draw(row: jax.Array, logits_V: jax.Array) -> jax.Array:
        return jax.random.categorical(jax.random.fold_in(jax.random.fold_in(key, row), step), logits_V)

    rows_B = jnp.arange(len(logits_BV), dtype=jnp.int32)
    return jax.vmap(draw)(rows_B, logits_BV).astype(jnp.int32)


def log_probability(logits_BV: jax.Array, tokens_B: jax.Array) -> jax.Array:
    """Returns the log-probability of each row's token, float32 [B], of all tokens and at temperature 1."""
    chosen_B1 = jnp.take_along_axis(logits_BV, tokens_B[:, None], axis=1)
    return chosen_B1[:, 0] - jax.nn.logsumexp(logits_BV, axis=1)
