"""Weights that were published, not made up: Gemma 3 270M against what transformers makes of the same file.

The weights come from Python packages and are not in this repository; without those packages the test is
skipped. tests/huggingface/gemma_gguf.py names them, tests/golden/record_gemma_gguf.py recorded the figures.
"""

import importlib
import json
import shutil
from pathlib import Path

import gemma_gguf
import numpy as np
import pytest

import jaxthru

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
absent = gemma_gguf.missing()
pytestmark = [
    pytest.mark.slow(minutes=1),
    pytest.mark.skipif(
        bool(absent), reason=f"needs {', '.join(absent)}: see tests/huggingface/gemma_gguf.py"
    ),
]


@pytest.fixture(scope="module")
def recorded():
    with np.load(GOLDEN / "gemma_gguf.npz") as arrays:
        return dict(arrays)


@pytest.fixture(scope="module")
def model(tmp_path_factory, recorded):
    """What `load` makes of the folder, in float32. Its files, 1.4 GB, do not outlive the tests."""
    assert (
        json.loads(str(recorded["about"]))["sha256"]
        == importlib.import_module(gemma_gguf.PACKAGE).EXPECTED_SHA256
    )
    folder = tmp_path_factory.mktemp("gemma")
    file = gemma_gguf.assemble(folder)
    gemma_gguf.write_folder(file, folder / "published")
    yield jaxthru.load(folder / "published")
    shutil.rmtree(folder)


def test_tokens(model, recorded):
    text = (GOLDEN / "gemma_text.md").read_text(encoding="utf-8")
    np.testing.assert_array_equal(model.encode(text), recorded["ids"])
    assert model.tokenizer.decode(recorded["ids"], skip_special=True) == text


def test_perplexity(model, recorded):
    """On 1,100 of the 2,899 tokens recorded, more than two windows of the local layers. Each loss too, as a
    mean hides much: a window that is one short moves the perplexity by 0.004 %, and single losses by 0.4."""
    losses = -model.logprobs(recorded["ids"][:1100])[0].astype(np.float64)
    expected = recorded["losses"][: len(losses)].astype(np.float64)
    np.testing.assert_allclose(np.exp(losses.mean()), np.exp(expected.mean()), rtol=1e-5)
    np.testing.assert_allclose(losses, expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize(("prompt", "count"), [("short", 16), ("long", 32)])
def test_greedy(model, recorded, prompt, count):
    """The long prompt is longer than the window: the local layers' caches have gone round."""
    (found,) = model.tokens([recorded[f"prompt_{prompt}"]], max_tokens=count, temperature=0)
    np.testing.assert_array_equal(found, recorded[f"greedy_{prompt}"][:count])
