"""The model card of an exported run: README.md, of which the hub reads the first lines."""

import json
import math
import re
from pathlib import Path
from typing import Any

from jaxthru.models.published import name_of
from jaxthru.training.run_directory import RunDirectory

SETTINGS = (
    *("train.steps", "train.rows", "data.sequence", "data.mix", "optim.name", "optim.learning_rate"),
    *("optim.weight_decay", "precision.compute", "precision.matmul", "train.seed"),
    *("lora.rank", "lora.alpha", "lora.rslora", "lora.dropout", "lora.base"),
)
"""Keys of the configuration that a reader of a card looks for."""


def model_card(
    run: RunDirectory,
    config: dict[str, Any],
    name: str,
    step: int,
    dtype: str,
    relation: str = "finetune",
) -> str:
    """Returns the card of a run's weights after `step` updates.

    config: the run's configuration, {whole key: value}. name: of the model. dtype: of the exported weights.
    relation: to its base, `finetune` or `adapter`.
    """
    base = config.get("model.pretrained")
    library = "peft" if relation == "adapter" else "transformers"
    head = {"library_name": library, "pipeline_tag": "text-generation"}
    license_ = license_of(run.base / "README.md")
    if base:
        head = {"base_model": name_of(base), "base_model_relation": relation} | head
    front = ["---", *(f"{key}: {_yaml(value)}" for key, value in head.items())]
    front += [*license_, "tags:", "- jaxthru", "---"]
    began = f"continued from `{name_of(base)}`" if base else "trained from random weights"
    what = f"A language model of the family `{config.get('model.family')}`, {began}"
    if config.get("lora.rank"):
        alone = "Low-rank adapters" if relation == "adapter" else "Weights with low-rank adapters merged in,"
        what = f"{alone} of rank {config['lora.rank']} beside `{name_of(base)}`, trained"
    after = f"after {step:,} update{'s' * (step != 1)}"
    lines = [f"# {name}", "", f"{what} with jaxthru, {after}. The weights are {dtype}."]
    if base and not license_:
        lines += ["", f"The license is that of `{name_of(base)}`, whose card did not name it."]
    lines += ["", *_table("Training", _results(run, step)), "", *_table("Settings", _settings(config)), ""]
    return "\n".join([*front, "", *lines])


def license_of(card: Path) -> list[str]:
    """Returns the lines with which a model card names its license, and the name and the link of one that is
    no usual one."""
    try:
        text = card.read_text(encoding="utf-8")  # which makes line ends \n
    except (OSError, UnicodeDecodeError):
        return []
    front = re.match(r"---\n(.*?)\n---", text, re.DOTALL)
    lines = front[1].split("\n") if front else []
    return [line.rstrip() for line in lines if re.match(r"license(_name|_link)?:[ \t]*\S", line)]


def _yaml(value: str) -> str:
    """Returns a text as a value in YAML: as it is where that is plain, else in quotes."""
    return value if re.fullmatch(r"[\w][\w./-]*", value) else json.dumps(value)


def _results(run: RunDirectory, step: int) -> list[tuple[str, str]]:
    """Returns what the record says of the updates up to a step."""
    rows = [row for row in run.read_metrics() if row["step"] <= step]
    evaluations = [row for row in run.read_eval() if row["step"] <= step and row["loss"] is not None]
    found = [("updates", f"{step:,}"), ("tokens", f"{sum(row['tokens'] or 0 for row in rows):,}")]
    losses = [row["loss"] for row in rows if row["loss"] is not None]
    if losses:
        found.append(("training loss, first and last", f"{losses[0]:.4f}, {losses[-1]:.4f}"))
    if evaluations:
        last = evaluations[-1]
        loss = last["loss"]
        found.append(
            (f"held-out loss after update {last['step']:,}", f"{loss:.4f} (perplexity {math.exp(loss):.2f})")
        )
        by_source = (last["loss_by_source"] or {}).items()
        found += [
            (f"held-out loss, {source}", f"{each:.4f}") for source, each in by_source if each is not None
        ]
    return found


def _settings(config: dict[str, Any]) -> list[tuple[str, str]]:
    shown = [key for key in SETTINGS if key in config and (config.get("lora.rank") or key[:5] != "lora.")]
    return [(f"`{key}`", f"`{config[key]}`") for key in shown]


def _table(title: str, rows: list[tuple[str, str]]) -> list[str]:
    return [f"## {title}", "", "| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)]
