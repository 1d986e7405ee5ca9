"""Runs that begin with published weights, in the tests' own process: folders, a mix, and what trains."""

import dataclasses
import json
import shutil
from collections.abc import Iterable
from pathlib import Path

import jax
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

import jaxthru
from jaxthru.runtime import hardware

FOLDERS = Path(__file__).resolve().parent / "golden" / "folders"
SPECIAL = {
    **dict.fromkeys(("mistral", "smollm", "qwen2", "qwen3"), ("<pad>", "<s>", "</s>")),
    "gemma3": ("<pad>", "</s>", "<s>"),  # its config.json numbers them so
}
BEGINS = ("mistral", "smollm", "gemma3")
LETTERS = " abcdefghijklmnopqrstuvwxyz.,:\n"
CARD = "---\nlicense: apache-2.0\n---\n\n# A model\n"
TEXT = "the cat sat on a mat, and the dog ran to the big red house by the sea. "
CONFIG = """\
from jaxthru.config import *

def config():
    return RunConfig(
        train=TrainConfig(steps=1, rows=8),
        data=DataConfig(mix={mix!r}, store={store!r}, sequence=32, loaders=1),
        optim=OptimConfig(learning_rate=1e-30),
        precision=PrecisionConfig(compute="float32"),
        kernels=KernelsConfig(attention="xla"),
        evaluate=EvaluateConfig(rows=0),
        metrics=MetricsConfig(tensorboard=False),
    )
"""


def save_tokenizer(folder: Path, name: str = "smollm", more: int = 0) -> None:
    """Writes a tokenizer of letters, whose text begins and ends as a golden folder's does. more: ordinary
    tokens beyond those."""
    special = SPECIAL[name]
    words = [*special, *LETTERS, *(chr(0x4E00 + number) for number in range(more))]
    made = tokenizers.Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, "<pad>"))
    made.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    made.decoder = decoders.Fuse()
    made.add_special_tokens(list(special))
    if name in BEGINS:
        begin = ("<s>", special.index("<s>"))
        made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[begin])
    folder.mkdir(exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    keys = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(keys))


def folder_of(parent: Path, name: str) -> Path:
    """Makes a whole folder of one of the golden ones, with a tokenizer and a card."""
    folder = parent / name
    shutil.copytree(FOLDERS / name, folder, ignore=shutil.ignore_patterns("golden.npz"))
    save_tokenizer(folder, name)
    (folder / "README.md").write_text(CARD)
    (folder / "LICENSE").write_text("As is.\n")
    return folder


def change_json(path: Path, **keys) -> None:
    """Sets keys in a JSON file; None takes one out."""
    tree = json.loads(path.read_text()) | keys
    path.write_text(json.dumps({key: value for key, value in tree.items() if value is not None}))


@dataclasses.dataclass(frozen=True)
class Site:
    """A folder with a mix of letters, and a configuration that names no shape."""

    path: Path

    @property
    def file(self) -> Path:
        return self.path / "plain.py"

    def config(self, *settings: str) -> jaxthru.RunConfig:
        return jaxthru.load_config(self.file, settings)


def make_site(path: Path) -> Site:
    (path / "text").mkdir()
    for number in range(40):
        (path / "text" / f"{number}.txt").write_text(f"{number % 7 * 'ab'} {TEXT * (1 + number % 5)}")
    (path / "mix.toml").write_text(
        'held_out = 0.2\n[sources.letters]\nrecipe = "local_text"\nweight = 1.0\npaths = ["text/*.txt"]\n'
    )
    (path / "plain.py").write_text(CONFIG.format(mix=str(path / "mix.toml"), store=str(path / "store")))
    return Site(path)


def only(patch, count: int) -> None:
    """Lets this process see the first devices alone."""
    devices = jax.devices()[:count]
    patch.setattr(hardware, "devices", lambda: devices)


def uncached(model, prompt: str, tokens: int, stop: Iterable[int] = ()) -> str:
    """Returns what whole passes say follows, one token after the other. All are of one length. stop: what
    ends it beside the model's own."""
    ids = model.encode(prompt).tolist()
    begun, ends = len(ids), {*model.stop, *stop}
    while len(ids) < begun + tokens:
        row = [*ids, *[0] * (begun + tokens - len(ids))]
        following = int(model.logits(row)[len(ids) - 1].argmax())
        if following in ends:
            break
        ids.append(following)
    return model.tokenizer.decode(ids[begun:], skip_special=True)
