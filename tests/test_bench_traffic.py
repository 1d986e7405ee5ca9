"""The bytes that a step's kernels move, of a program that is compiled for a GPU that is not here."""

import json
import os
import subprocess
import sys

import jax
import pytest
from runs import ROOT

from jaxthru import config as configuration
from jaxthru.models import family


@pytest.mark.compiles_for("cuda")
def test_traffic_counts_what_an_update_must_move(tmp_path):
    """AdamW reads weight, moments and gradient and writes all but the last; the norm reads that once more."""
    output, layers = tmp_path / "traffic.json", 2
    settings = f"model.layers={layers} model.loop=unroll data.sequence=256 train.rows=2 model.embed=256"
    words = [word for text in settings.split() for word in ("--set", text)]
    command = [
        sys.executable,
        str(ROOT / "scripts" / "bench" / "measure" / "traffic.py"),
        "--config",
        "llama3_8b_8layer",
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    ended = subprocess.run(
        [*command, *words, "--output", str(output)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr
    parts = json.loads(output.read_text())["parts"]
    parameters = family.chain(configuration.load("llama3_8b_8layer", settings.split()).model)
    sizes = [leaf.size for stage in parameters.stages for leaf in jax.tree.leaves(stage.shapes)]
    matrices = layers * sum(leaf.size for leaf in jax.tree.leaves(parameters.layers[0].shapes))
    tables = sum(sizes) - matrices // layers
    updates = sum(part["bytes"] for part in parts if part["phase"] == "optimizer")
    assert 1 <= updates / ((24 + 2 + 2) * matrices + (24 + 4 + 4) * tables) < 1.02
    scopes = {(part["phase"], part["scope"]) for part in parts}
    assert {("forward", "mlp/norm"), ("backward", "mlp"), ("forward", "loss")} <= scopes
