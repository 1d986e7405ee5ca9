"""Text generation from a model and its parameters, and the logits of any text.

A call is two programs: the prefill, and a loop over tokens that stays on the device until all rows have
ended. Their shapes come in few sizes, so that most calls find them compiled.

Shapes: B rows, T tokens of the longest prompt, S slots of a cache, V vocabulary.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxthru.engine.inline import hidden
from jaxthru.engine.model import Model
from jaxthru.generation import chain
from jaxthru.generation.cache import Time
from jaxthru.generation.sampling import Sampling, choose, log_probability
from jaxthru.generation.sizes import power_of_two, size
from jaxthru.runtime.errors import TrainingError, require
from jaxthru.runtime.first_run import FirstAlone

Tree = Any
Prompts = Sequence[Sequence[int] | np.ndarray]
PIECE = 1024  # tokens whose logits are there at once, or half as many, for scores
CHUNK = 8  # tokens between two calls of `on_tokens`


class Generated(NamedTuple):
    """What followed a prompt.

    tokens: int32, without the stop token. stop: the stop token that ended it, None where max_tokens did.
    logprobs: float32, of each of `tokens` and of the stop token, the natural logarithm of its probability
    among all tokens, before temperature, top_k and top_p.
    """

    tokens: np.ndarray
    stop: int | None
    logprobs: np.ndarray

    @property
    def stopped(self) -> bool:
        """Says whether a stop token ended it."""
        return self.stop is not None


class Scores(NamedTuple):
    """Of each token of a row but the first, given those before it.

    logprobs: float32, the natural logarithm of its probability. likeliest: bool, whether none is more
    probable.
    """

    logprobs: np.ndarray
    likeliest: np.ndarray


class Progress(NamedTuple):
    """What the loop over tokens carries.

    made: int32, tokens of each row. latest_B: the last of them. ended_B: rows that want no more. tokens_BS:
    int32, -1 after a row's end. logprobs_BS: float32.
    """

    made: jax.Array
    latest_B: jax.Array
    ended_B: jax.Array
    tokens_BS: jax.Array
    logprobs_BS: jax.Array
    caches: Tree


class Generator:
    """Continues prompts, on the model's mesh. Programs are compiled at the first call of each size, and kept
    as long as this object."""

    def __init__(self, model: Model, params: Tree, longest: int | None = None):
        """params: of the model, scanned or unrolled as it is; see `chain.in_compute_dtype` for what is
        copied. longest: tokens of the context, prompt and generated ones; None is no bound."""
        self.model, self.longest = chain.for_generation(model), longest
        self._programs: dict[tuple, FirstAlone] = {}
        self.take(params)

    def take(self, params: Tree) -> None:
        """Puts other parameters of the same model in place; what is compiled stays."""
        self.params = chain.in_compute_dtype(self.model, params)
        matrix, axes = self.model.lm_head(self.params)
        self.ids = matrix.shape[axes.index("vocab")]

    def generate(
        self,
        prompts: Prompts,
        sampling: Sampling,
        stop: Sequence[int] = (),
        on_tokens: Callable[[list[np.ndarray]], bool | None] | None = None,
    ) -> list[Generated]:
        """Returns what follows each prompt.

        prompts: ids of each, of any lengths. They share a batch, so their number is bounded by memory; what
        follows one does not depend on the others. stop: ids that end a row. on_tokens: called every few
        tokens with those that each row has got since, without stop tokens; True ends all rows.

        Raises InputError for a prompt without tokens, with an id that is not in the vocabulary, or that has
        no room for `sampling.max_tokens` in the context, before device work; TrainingError for logits that
        are not numbers.
        """
        rows = [self._checked(f"prompt {at + 1}", each) for at, each in enumerate(prompts)]
        for at, row in enumerate(rows):
            self._check_room(f"prompt {at + 1}", len(row), sampling.max_tokens)
        if not rows:
            return []
        progress, began_B, first = self._prefilled(rows, sampling, stop)
        decode = self._program(self._decode, sampling.rule, donate=(1,))
        ends = _stop_array(stop)
        every = CHUNK if on_tokens else sampling.max_tokens
        seen = 0
        for until in range(every, sampling.max_tokens + every, every):
            until = min(until, sampling.max_tokens)
            progress = decode(self.params, progress, np.int32(until), first, began_B, ends, sampling.values)
            if on_tokens:
                tokens = np.asarray(progress.tokens_BS)[: len(rows), seen:until]
                enough = on_tokens([_until_stop(row[row >= 0], stop)[0] for row in tokens])
                seen = until
                if enough or np.asarray(progress.ended_B).all():
                    break
        tokens, logprobs = (np.asarray(each) for each in (progress.tokens_BS, progress.logprobs_BS))
        return [self._result(*row, stop) for row in zip(tokens[: len(rows)], logprobs, strict=False)]

    def logits(self, tokens_BT: np.ndarray | Sequence[Sequence[int]]) -> jax.Array:
        """Returns float32 [B, T, V], of a forward pass without a cache: at each token, of the one after it.

        tokens_BT: ids, each row one document of as many tokens. Raises InputError as `generate`.
        """
        rows = [self._checked(f"row {at + 1}", each) for at, each in enumerate(tokens_BT)]
        lengths = {len(row) for row in rows}
        require(len(lengths) == 1, f"logits: rows of {sorted(lengths)} tokens; must be one or more, as long")
        self._check_room("row 1", lengths.copy().pop(), 0)
        batch_BT, lengths_B = self._padded(rows)
        of_all = self._program(self._logits)(self.params, batch_BT, lengths_B)
        return of_all[: len(rows), : lengths.pop()]

    def scores(self, rows: Prompts) -> list[Scores]:
        """Returns how probable each token of each row is, of any lengths, given those before it. The logits
        of all tokens are never there at once. A row may have one token more than the context, as nothing
        follows its last. Raises InputError as `generate`."""
        checked = [self._checked(f"row {at + 1}", each) for at, each in enumerate(rows)]
        before = [row[: max(len(row) - 1, 1)] for row in checked]
        for at, row in enumerate(before):
            self._check_room(f"row {at + 1}, without its last token", len(row), 0)
        if not checked:
            return []
        tokens_BT, lengths_B = self._padded(before)
        following_BT = np.zeros_like(tokens_BT)
        for at, row in enumerate(checked):
            following_BT[at, : len(row) - 1] = row[1:]
        found = map(np.asarray, self._program(self._scores)(self.params, tokens_BT, following_BT, lengths_B))
        columns = list(zip(*found, strict=True))[: len(checked)]
        return [
            Scores(*(each[: len(row) - 1] for each in of_row))
            for row, of_row in zip(checked, columns, strict=True)
        ]

    def _checked(self, name: str, ids: Sequence[int] | np.ndarray) -> np.ndarray:
        row = np.asarray(ids)
        require(row.ndim == 1 and row.size > 0, f"{name}: has no tokens; must have one or more")
        require(np.issubdtype(row.dtype, np.integer), f"{name}: is of {row.dtype}; must be ids, integers")
        outside = row[(row < 0) | (row >= self.ids)]
        require(not outside.size, lambda: f"{name}: id {outside[0]} is not in the vocabulary of {self.ids}")
        return row.astype(np.int32)

    def _check_room(self, name: str, tokens: int, more: int) -> None:
        check_context(name, tokens, more, self.longest)

    def _padded(self, rows: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Returns the rows as int32 [B, T] and their lengths [B], in one of few sizes. Rows that only fill it
        up have one token."""
        devices = self.model.ops.layout.mesh.size
        padded = np.zeros((devices * power_of_two(-(-len(rows) // devices)), size(max(map(len, rows)))))
        lengths_B = np.ones(len(padded), np.int32)
        for at, row in enumerate(rows):
            padded[at, : len(row)], lengths_B[at] = row, len(row)
        return padded.astype(np.int32), lengths_B

    def _prefilled(
        self, rows: list[np.ndarray], sampling: Sampling, stop: Sequence[int]
    ) -> tuple[Progress, np.ndarray, np.int32]:
        """Returns the progress with one token made, the time at which each row began, and the time of that
        first token."""
        tokens_BT, lengths_B = self._padded(rows)
        length = tokens_BT.shape[1]
        program = self._program(self._prefill, sampling.rule, size(length + sampling.max_tokens))
        fills_B = np.arange(len(tokens_BT)) >= len(rows)
        ends = _stop_array(stop)
        progress = program(self.params, tokens_BT, lengths_B, fills_B, ends, sampling.values)
        return progress, length - lengths_B, np.int32(length)

    def _program(self, function: Callable, *static: Any, donate: tuple[int, ...] = ()) -> Callable:
        """Returns a jitted function with its last arguments bound. Compiled for other shapes it compiles
        again, and the first run of each is alone on the devices."""

        def run(*arguments: Any) -> Any:
            shapes = tuple(jnp.shape(leaf) for leaf in jax.tree.leaves(arguments[1:]))
            key = function.__name__, *static, shapes
            if key not in self._programs:
                bound = functools.partial(function, *static)
                self._programs[key] = FirstAlone(jax.jit(bound, donate_argnums=donate))
            return self._programs[key](*arguments)

        return run

    def _prefill(self, rule, slots, params, tokens_BT, lengths_B, fills_B, ends, values) -> Progress:
        logits_BV, caches = chain.prefill(self.model, params, tokens_BT, lengths_B, slots)
        rows = len(tokens_BT)
        none = Progress(
            made=jnp.int32(0),
            latest_B=jnp.zeros(rows, jnp.int32),
            ended_B=fills_B,
            tokens_BS=jnp.full((rows, slots), -1, jnp.int32),
            logprobs_BS=jnp.zeros((rows, slots), jnp.float32),
            caches=caches,
        )
        return self._chosen(none, logits_BV, rule, ends, values)

    def _decode(self, rule, params, progress, until, first, began_B, ends, values) -> Progress:
        """Goes on to `until` tokens, or until all rows have ended."""

        def more(progress: Progress) -> jax.Array:
            return (progress.made < until) & ~jnp.all(progress.ended_B)

        def one(progress: Progress) -> Progress:
            time = Time(first + progress.made - 1, began_B)
            logits_BV, caches = chain.step(self.model, params, progress.latest_B, time, progress.caches)
            return self._chosen(progress._replace(caches=caches), logits_BV, rule, ends, values)

        return jax.lax.while_loop(more, one, progress)

    def _chosen(self, progress: Progress, logits_BV: jax.Array, rule, ends, values) -> Progress:
        """Returns the progress with one more token of each row."""
        ops = self.model.ops
        # Whole rows of logits on each device: a draw must not depend on how the vocabulary is split.
        logits_BV = ops.constrain(logits_BV, None, None)
        latest_B = choose(logits_BV, progress.made, rule, values)
        kept_B = jnp.where(progress.ended_B, -1, latest_B)
        columns = {"tokens_BS": kept_B, "logprobs_BS": log_probability(logits_BV, latest_B)}
        written = {
            name: ops.constrain(
                jax.lax.dynamic_update_slice_in_dim(
                    getattr(progress, name), column[:, None], progress.made, axis=1
                ),
                *(None, None),
            )
            for name, column in columns.items()
        }
        ended_B = progress.ended_B | jnp.any(latest_B[:, None] == ends[None], axis=1)
        return progress._replace(
            made=progress.made + 1, latest_B=latest_B, ended_B=ops.constrain(ended_B, None), **written
        )

    def _logits(self, params: Tree, tokens_BT: jax.Array, lengths_B: jax.Array) -> jax.Array:
        positions_BT, ids_BT = chain.prompt_positions(tokens_BT, lengths_B)
        batch = {"tokens": tokens_BT, "positions": positions_BT, "segment_ids": ids_BT}
        hidden_ND = hidden(self.model, params, batch, 2)
        return chain.lm_head_logits(self.model, params, hidden_ND).reshape(*tokens_BT.shape, -1)

    def _scores(
        self, params: Tree, tokens_BT: jax.Array, following_BT: jax.Array, lengths_B: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        positions_BT, ids_BT = chain.prompt_positions(tokens_BT, lengths_B)
        batch = {"tokens": tokens_BT, "positions": positions_BT, "segment_ids": ids_BT}
        hidden_ND = hidden(self.model, params, batch, 2)

        def piece(each: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            hidden_ND, tokens_N = each
            logits_NV = chain.lm_head_logits(self.model, params, hidden_ND)
            likeliest_N = jnp.argmax(logits_NV, axis=1).astype(jnp.int32) == tokens_N
            return log_probability(logits_NV, tokens_N), likeliest_N

        count = power_of_two(max(len(hidden_ND) // PIECE, 1))  # which divides sizes of rows and tokens
        pieces = hidden_ND.reshape(count, -1, hidden_ND.shape[1])
        found = jax.lax.map(piece, (pieces, following_BT.reshape(pieces.shape[:2])))
        return tuple(each.reshape(tokens_BT.shape) for each in found)

    def _result(self, tokens_S: np.ndarray, logprobs_S: np.ndarray, stop: Sequence[int]) -> Generated:
        tokens = tokens_S[tokens_S >= 0]
        logprobs = logprobs_S[: len(tokens)]
        if not np.isfinite(logprobs).all():
            raise TrainingError("the model's logits are not finite: its parameters, or what they overflow to")
        return Generated(*_until_stop(tokens, stop), logprobs)


def check_context(name: str, tokens: int, more: int, longest: int | None) -> None:
    """Raises InputError for a row of no tokens, or of more than the context has. name: of the row, for the
    message. more: tokens that are to follow it. longest: of the context, None is no bound."""
    require(tokens > 0, f"{name}: has no tokens; must have one or more")
    said = f"{name}: {tokens} tokens" + (f" and max_tokens = {more} are {tokens + more}" if more else "")
    fits = longest is None or tokens + more <= longest
    require(fits, f"{said}: more than the model's context of {longest}")


def _stop_array(stop: Sequence[int]) -> np.ndarray:
    """Returns the stop tokens, filled up with an id that no token has, so that few programs are compiled."""
    return np.array([*stop, *[-1] * (power_of_two(max(len(stop), 4)) - len(stop))], np.int32)


def _until_stop(tokens: np.ndarray, stop: Sequence[int]) -> tuple[np.ndarray, int | None]:
    """Returns a row's tokens without a stop token at their end, and that token."""
    if len(tokens) and int(tokens[-1]) in stop:
        return tokens[:-1], int(tokens[-1])
    return tokens, None
