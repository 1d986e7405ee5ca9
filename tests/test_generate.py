"""Text by a cache is the text of whole forward passes; sampling, stop tokens, and what is refused."""

import argparse
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine import parallel_blocks
from models.toys import windowed
from tiny import bind

from jaxthru.generation import chain
from jaxthru.generation.cache import Time
from jaxthru.generation.generator import Generator
from jaxthru.generation.sampling import Sampling, choose, likeliest
from jaxthru.generation.sizes import size
from jaxthru.models.llama import Config
from jaxthru.models.ops import Ops
from jaxthru.runtime.errors import InputError, TrainingError
from jaxthru.runtime.mesh import MeshConfig, make_mesh
from jaxthru.runtime.sharding import Layout

SHAPE = Config(vocabulary=256, layers=2, embed=32, heads=4, kv_heads=2, head_dim=8, mlp=48, loop="unroll")
LENGTHS, TOKENS = (5, 70, 33), 40  # shorter and longer than a window of 24, which all then grow out of
GREEDY = Sampling(temperature=0.0, max_tokens=TOKENS)


def generator(shape, mesh=(1, 1, 1), compute="float32", longest=None) -> Generator:
    layout = Layout(make_mesh(MeshConfig(*mesh), jax.devices()[: int(np.prod(mesh))]))
    model = bind(shape, Ops(layout, jnp.dtype(compute)), "none")
    return Generator(model, jax.jit(model.init)(jax.random.key(1)), longest)


@functools.cache
def small() -> Generator:
    return generator(SHAPE, longest=200)


@functools.cache
def prompts(vocabulary: int = 256) -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [random.integers(0, vocabulary, length) for length in LENGTHS]


@functools.cache
def greedy():
    return small().generate(prompts(), GREEDY)


def agrees_with_whole_passes(made: Generator, given: list[np.ndarray], found: list) -> None:
    """A whole pass over a text says of each of its tokens which is the likeliest next, and how likely."""
    texts = [np.concatenate([prompt, each.tokens]) for prompt, each in zip(given, found, strict=True)]
    longest = max(map(len, texts))  # what follows a text changes nothing in it, and one pass does for all
    logits = made.logits([np.pad(text, (0, longest - len(text))) for text in texts])
    for prompt, generated, of_row in zip(given, found, np.asarray(logits), strict=True):
        assert len(generated.tokens) == TOKENS and not generated.stopped
        before = of_row[len(prompt) - 1 : len(prompt) - 1 + TOKENS]
        np.testing.assert_array_equal(before.argmax(axis=1), generated.tokens)
        expected = np.asarray(jax.nn.log_softmax(before))[np.arange(TOKENS), generated.tokens]
        np.testing.assert_allclose(generated.logprobs, expected, atol=1e-5)


CASES = {
    "grouped": (SHAPE, (1, 1, 1)),
    "mesh": (Config(**{**vars(SHAPE), "loop": "scan"}), (2, 2, 2)),
}
MORE = {
    "normed_tied": (Config(**{**vars(SHAPE), "qk_norm": True, "tied_embeddings": True}), (1, 1, 1)),
    "windows_unrolled": (windowed.Config(loop="unroll"), (1, 1, 1)),
    "windows_mesh": (windowed.Config(), (2, 2, 2)),
    "pattern": (parallel_blocks.Config(), (1, 1, 1)),
    "pattern_unrolled": (parallel_blocks.Config(loop="unroll"), (1, 1, 1)),
    "unrolled_mesh": (SHAPE, (2, 2, 2)),
}


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)])
def test_a_cache_changes_no_token(case):
    shape, mesh = (CASES | MORE)[case]
    if case == "grouped":
        return agrees_with_whole_passes(small(), prompts(), greedy())
    made = generator(shape, mesh)
    return agrees_with_whole_passes(made, prompts(), made.generate(prompts(), GREEDY))


def test_every_logit_by_a_cache_is_that_of_a_whole_pass():
    """With windows, one shorter than the prompt and one that the text grows out of."""
    made, length = generator(windowed.Config()), 80
    texts = np.random.default_rng(1).integers(0, 256, (2, length)).astype(np.int32)
    expected = np.asarray(made.logits(texts))
    given = np.array([7, 48], np.int32)
    first = jax.jit(functools.partial(chain.prefill, made.model, slots=128))
    step = jax.jit(functools.partial(chain.step, made.model))
    logits, caches = first(made.params, texts[:, :64], given)
    for more in range(length - 48):
        at = given + more
        np.testing.assert_allclose(logits, expected[[0, 1], at - 1], atol=1e-5)
        time = Time(jnp.int32(64 + more), 64 - given)
        logits, caches = step(made.params, texts[[0, 1], at], time, caches)
    windows = [cache.keys.shape[-2] for group in caches for block in group for cache in block]
    assert windows == [128, 24, 128, 128, 24]


def test_a_prompt_alone_gives_the_text_that_it_gives_among_others():
    (alone,) = small().generate([prompts()[0].tolist()], GREEDY)
    np.testing.assert_array_equal(alone.tokens, greedy()[0].tokens)


@pytest.mark.parametrize("loop", ["scan", "unroll"])
def test_the_loop_over_tokens_copies_no_cache(loop):
    made = small() if loop == "unroll" else generator(Config(**{**vars(SHAPE), "loop": loop}))
    abstract = lambda tree: jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(*of(leaf)), tree)  # noqa: E731
    of = lambda leaf: (np.shape(leaf), leaf.dtype)  # noqa: E731
    params, ends = abstract(made.params), jax.ShapeDtypeStruct((4,), jnp.int32)
    tokens, one = jax.ShapeDtypeStruct((2, 64), jnp.int32), jax.ShapeDtypeStruct((2,), jnp.int32)
    fills, scalar = jax.ShapeDtypeStruct((2,), jnp.bool), jax.ShapeDtypeStruct((), jnp.int32)
    first = functools.partial(made._prefill, "greedy", 192)
    progress = jax.eval_shape(first, params, tokens, one, fills, ends, GREEDY.values)
    decode = jax.jit(functools.partial(made._decode, "greedy"), donate_argnums=1)
    lowered = decode.lower(params, progress, scalar, scalar, one, ends, GREEDY.values)
    text = lowered.compile().as_text()
    caches = ["2,2,2,192,8", "2,2,192,8", "1,2,2,192,8"]
    copied = [
        line
        for body in re.split(r"\n(?=%|ENTRY)", text)
        if not body.startswith("ENTRY")  # what comes in is not given away on a CPU
        for line in body.splitlines()
        if re.search(rf"= f32\[({'|'.join(caches)})\]\S* copy\(", line)
    ]
    assert "dynamic-update-slice" in text and not copied, copied


def test_a_stop_token_ends_a_row_and_no_other():
    whole = greedy()
    stop = (int(whole[0].tokens[7]), 255)
    found = small().generate(prompts(), GREEDY, stop)
    for one, of in zip(found, whole, strict=True):
        ends = np.flatnonzero(np.isin(of.tokens, stop))
        end = int(ends[0]) if len(ends) else TOKENS
        np.testing.assert_array_equal(one.tokens, of.tokens[:end])
        assert one.stop == (int(of.tokens[end]) if len(ends) else None) and one.stopped == bool(len(ends))
        assert len(one.logprobs) == end + one.stopped
    assert found[0].stopped and len(found[0].tokens) <= 7
    heard = [[], [], []]

    def listen(each: list[np.ndarray]) -> None:
        for row, more in zip(heard, each, strict=True):
            row.extend(more)

    small().generate(prompts(), GREEDY, stop, listen)
    assert [list(one.tokens) for one in found] == heard
    cut = small().generate(prompts(), GREEDY, on_tokens=lambda each: True)
    assert all(np.array_equal(one.tokens, of.tokens[:8]) for one, of in zip(cut, whole, strict=True))


def test_draws_repeat_by_seed_and_row():
    one = Sampling(temperature=1.5, top_k=100, top_p=0.95, seed=3, max_tokens=TOKENS)
    text = small().generate(prompts(), one)
    again = small().generate(prompts(), one)
    assert all(np.array_equal(a.tokens, b.tokens) for a, b in zip(text, again, strict=True))
    other = small().generate(prompts(), Sampling(1.5, 100, 0.95, 4, TOKENS))
    assert not np.array_equal(other[0].tokens, text[0].tokens)
    of_one = small().generate(prompts(), Sampling(temperature=2.0, top_k=1, max_tokens=TOKENS))
    assert all(np.array_equal(a.tokens, b.tokens) for a, b in zip(of_one, greedy(), strict=True))


def kept_by_transformers(logits: np.ndarray, top_k: int, top_p: float) -> np.ndarray:
    """Returns which tokens TopKLogitsWarper, then TopPLogitsWarper, keep, in float64."""
    logits = logits.astype(np.float64)
    if top_k:
        logits = np.where(logits < np.sort(logits)[-min(top_k, len(logits))], -np.inf, logits)
    order = np.argsort(logits)  # the least likely first
    share = np.exp(logits[order] - logits.max())
    gone = np.cumsum(share / share.sum()) <= 1 - top_p
    gone[-1] = False
    kept = np.isfinite(logits)
    kept[order[gone]] = False
    return kept


@pytest.mark.parametrize("top_k", [0, 1, 7, 1000])
@pytest.mark.parametrize("top_p", [1e-6, 0.3, 0.9, 1.0])
def test_what_is_drawn_of_is_what_transformers_draws_of(top_k, top_p):
    logits = np.random.default_rng(top_k).normal(0, 2, (4, 50)).astype(np.float32)
    found = np.asarray(likeliest(jnp.asarray(logits), jnp.int32(top_k), jnp.float32(top_p)))
    expected = np.stack([kept_by_transformers(row, top_k, top_p) for row in logits])
    np.testing.assert_array_equal(np.isfinite(found), expected)
    np.testing.assert_array_equal(found[expected], logits[expected])


def test_draws_have_the_probabilities_that_are_left():
    share, draws = np.array([0.4, 0.3, 0.2, 0.1]), 4000
    logits = jnp.log(jnp.asarray(share, jnp.float32))[None]
    values = Sampling(temperature=0.5, top_p=0.8, seed=1).values
    steps = jnp.arange(draws, dtype=jnp.int32)
    drawn = jax.jit(jax.vmap(lambda step: choose(logits, step, "likeliest", values)))(steps)
    left = np.where([True, True, False, False], share**2, 0)  # 0.53 and 0.30 of all squares
    expected = left / left.sum()
    found = np.bincount(np.asarray(drawn)[:, 0], minlength=4) / draws
    np.testing.assert_allclose(found, expected, atol=4 * 0.5 * draws**-0.5)
    assert found[2] == found[3] == 0


@pytest.mark.parametrize(
    ("given", "sampling", "message"),
    [
        ([[1], []], GREEDY, "prompt 2: has no tokens"),
        ([[1, 256]], GREEDY, "prompt 1: id 256 is not in the vocabulary of 256"),
        ([[-1]], GREEDY, "prompt 1: id -1 is not in"),
        ([[0.5]], GREEDY, "prompt 1: is of float64; must be ids"),
        (
            [[1] * 161],
            GREEDY,
            r"prompt 1: 161 tokens and max_tokens = 40 are 201: more than .* context of 200",
        ),
    ],
)
def test_what_cannot_be_continued_is_one_line(given, sampling, message):
    with pytest.raises(InputError, match=message):
        small().generate(given, sampling)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"temperature": -1.0}, "temperature = -1.0: must be at least 0"),
        ({"top_k": -1}, "top_k = -1"),
        ({"top_p": 0.0}, "top_p = 0.0: must be above 0"),
        ({"seed": -1}, "seed = -1"),
        ({"max_tokens": 0}, "max_tokens = 0: must be at least 1"),
    ],
)
def test_a_key_that_cannot_be_is_one_line(keys, message):
    with pytest.raises(InputError, match=message):
        Sampling(**keys)


def test_no_prompts_give_no_texts():
    assert small().generate([], GREEDY) == []


def test_logits_that_are_no_numbers_are_said(monkeypatch):
    monkeypatch.setitem(small().params["head"], "norm", {"scale": jnp.full(SHAPE.embed, jnp.nan)})
    with pytest.raises(TrainingError, match="not finite"):
        small().generate(prompts(), GREEDY)


@pytest.mark.slow
@pytest.mark.parametrize("at", range(len(LENGTHS)))
def test_each_prompt_alone(at):
    (alone,) = small().generate([prompts()[at]], GREEDY)
    np.testing.assert_array_equal(alone.tokens, greedy()[at].tokens)


@pytest.mark.slow
def test_the_first_row_draws_alone_what_it_draws_among_others():
    drawn = Sampling(temperature=1.5, top_p=0.9, max_tokens=TOKENS)
    (alone,) = small().generate(prompts()[:1], drawn)
    np.testing.assert_array_equal(alone.tokens, small().generate(prompts(), drawn)[0].tokens)


def test_sizes_are_few_and_no_more_than_a_third_is_empty():
    sizes = {size(count) for count in range(1, 8193)}
    assert sorted(sizes) == [64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192]
    assert all(size(count) >= count and size(count) * 2 <= 3 * count for count in range(64, 8193))


@pytest.mark.slow
def test_in_bfloat16_the_cache_is_bfloat16_and_texts_are_near():
    made = generator(SHAPE, compute="bfloat16")
    types = {leaf.dtype for leaf in jax.tree.leaves(made.params)}
    assert types == {jnp.dtype("bfloat16"), jnp.dtype("float32")}, "norms stay as they are"
    (found,) = made.generate(prompts()[:1], GREEDY)
    logits = np.asarray(made.logits([[*prompts()[0], *found.tokens]]))[0, len(prompts()[0]) - 1 : -1]
    chosen = logits[np.arange(TOKENS), found.tokens]
    np.testing.assert_allclose(chosen, logits.max(axis=1), atol=0.05)


def test_the_benchmark_counts_what_a_token_reads(bench):
    decode, shape = bench("measure.decode"), bench("harness").TINY
    arguments = argparse.Namespace(batch=2, prompt=4, generate=8, warmup_seconds=0.0, timed_seconds=0.0)
    model = decode.model_of(shape, "float32")
    found = decode.measure(Generator(model, decode.random_params(model)), shape, arguments)
    layer = 2 * 64 + 64 * 16 * (2 * 4 + 2 * 2) + 3 * 64 * 128
    weights = 2 * layer + 64 + 64 * shape.vocabulary  # the embedding is looked up
    cache = 2 * 2 * 8 * 2 * 2 * 16  # two rows of eight tokens
    assert found["needed_bytes"] == 4 * (weights + cache)
    assert found["calls_timed"] >= 3 and found["rows"] == 2
    assert decode.bandwidth(1 / 64, 0.0) > 0
