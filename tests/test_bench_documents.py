"""The peer that keeps documents apart: what it makes of packed rows, and that its attentions agree."""

import importlib.util
import itertools
import sys

import numpy as np
import pytest

SHAPE = "--layers 2 --embed 64 --heads 4 --kv-heads 2 --head-dim 16 --mlp 128 --vocabulary 512"
LENGTHS = (((5, 40, 19), (64,)), ((30, 34), (1, 2, 3, 58)))

pytestmark = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("torch", "transformers"))), reason="PyTorch is not installed"
)


@pytest.fixture
def documents(bench):
    return bench("peers.torch_documents")


@pytest.fixture
def path(tmp_path):
    """Two batches of two packed rows."""
    ids = [[np.repeat(np.arange(len(row)) + 1, row) for row in batch] for batch in LENGTHS]
    positions = [
        [np.concatenate([np.arange(length) for length in row]) for row in batch] for batch in LENGTHS
    ]
    tokens = np.random.default_rng(0).integers(0, 512, (2, 2, 64)).astype(np.int32)
    targets, ids = np.roll(tokens, -1, axis=2), np.array(ids, np.int32)
    mask = (ids == np.roll(ids, -1, axis=2)).astype(np.float32)
    mask[..., -1] = 0
    arrays = {"tokens": tokens, "targets": targets, "loss_mask": mask, "segment_ids": ids}
    np.savez(tmp_path / "batches.npz", **arrays, positions=np.array(positions, np.int32))
    return tmp_path / "batches.npz"


def losses(bench, documents, path, how: str, *flags: str) -> list[float]:
    import torch

    arguments = (
        bench("peers.hugging_face").parser("").parse_args([*SHAPE.split(), "--compile", "none", *flags])
    )
    _, loss_of = bench("peers.hugging_face").prepared(arguments, f"documents_{how}")
    with torch.no_grad():
        return [float(loss_of(x, y, **more)) for x, y, more in documents.packed(path, how).batches]


def test_the_span_is_of_the_documents(documents, path):
    lengths = [length for batch in LENGTHS for row in batch for length in row]
    assert documents.packed(path, "varlen").span == sum(length**2 for length in lengths) / 256


def test_bounds_have_one_length_and_end_with_the_tokens(documents, path):
    (first, longest), (second, also) = (
        more["documents"] for _, _, more in documents.packed(path, "varlen").batches
    )
    assert first.tolist() == [0, 5, 45, 64, 128, 128, 128], "what fills it up has no tokens"
    assert second.tolist() == [0, 30, 64, 65, 67, 70, 128] and longest == also == 64


@pytest.mark.parametrize("flags", [(), ("--qk-norm", "1", "--tied-embeddings", "1")], ids=("llama", "qwen3"))
@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_all_attentions_keep_documents_apart(bench, documents, path, monkeypatch, flags):
    import torch

    def by_bounds(query, key, value, bounds, _, longest, __, *, window_size, enable_gqa):
        ends = bounds.tolist()
        found = [
            torch.nn.functional.scaled_dot_product_attention(
                *(x[a:b].transpose(0, 1)[None] for x in (query, key, value)),
                is_causal=True,
                enable_gqa=enable_gqa,
            )[0].transpose(0, 1)
            for a, b in itertools.pairwise(ends)
            if b > a
        ]
        assert window_size == (-1, 0) and max(np.diff(ends)) <= longest
        return torch.cat(found)

    monkeypatch.setattr(documents, "varlen_attn", by_bounds)
    by_mask = losses(bench, documents, path, "mask", *flags)
    for how in ("flex", "varlen"):
        assert losses(bench, documents, path, how, *flags) == pytest.approx(by_mask, rel=1e-5)
    causal = losses(bench, documents, path, "mask", *flags)
    # Another token in the first document changes nothing in the second one's loss alone.
    arrays = dict(np.load(path))
    arrays["loss_mask"][0, 0, :5] = 0
    np.savez(path, **arrays)
    before = losses(bench, documents, path, "flex", *flags)[0]
    arrays["tokens"][0, 0, :5] = 7
    np.savez(path, **arrays)
    assert losses(bench, documents, path, "flex", *flags)[0] == pytest.approx(before, rel=1e-6)
    assert before != causal[0]


@pytest.mark.parametrize("qk_norm", [0, 1])
def test_the_model_is_of_its_own_class_and_tied(bench, documents, qk_norm):
    flags = [*SHAPE.split(), "--tied-embeddings", "1", "--qk-norm", str(qk_norm), "--rope-theta", "1e6"]
    peer = bench("peers.hugging_face")
    model = peer.build(peer.parser("").parse_args(flags))
    assert type(model).__name__ == ("Qwen3ForCausalLM" if qk_norm else "LlamaForCausalLM")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.config.rope_parameters["rope_theta"] == 1e6
    assert "peers.torch_documents" in sys.modules
