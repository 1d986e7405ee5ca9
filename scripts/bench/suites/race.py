"""A race: a step of jaxthru beside the same step of other stacks, a process each, in turns.

All contenders run once; then ours again, and of the peers that the ratio is to those within 2 % of the
fastest, so that the two that are compared have two blocks each, in turns, and an A-A spread. A peer that is
slower than that has one block, and the record and the table say so.
"""

import dataclasses
import functools
import shlex
import sys

import blocks
import comparison
import harness
from suites.rows import Block, Row, Setup, config_file, rates

from jaxthru import config as configuration
from jaxthru.build.step import needed_flops
from jaxthru.runtime import hardware

NEAR = 0.98


@dataclasses.dataclass(frozen=True)
class Contender:
    """peer: a module of peers; without it, `script` here. settings: over the row's. arguments: as one types
    them, with {tokens} for the file of causal rows, {batches} for that of packed ones and {micro} for the
    rows of a micro-batch. seconds, layer_seconds: of a block, about, and in it
    of each layer, where all are compiled as one program. instead_of: contenders that all have to fail before
    it runs.
    """

    peer: str = ""
    arguments: str = ""
    seconds: float = 100.0
    layer_seconds: float = 0.0
    instead_of: tuple[str, ...] = ()
    settings: str = ""
    script: str = "measure/step.py"


# fmt: off
CONTENDERS = {
    "jaxthru": Contender(arguments="--causal-rows {tokens}", seconds=80, layer_seconds=2),
    "jaxthru_packed": Contender(arguments="--packed-rows {batches}", seconds=80, layer_seconds=2),
    "hf": Contender("hugging_face", layer_seconds=4),
    "hf_blocks": Contender("hugging_face", "--compile blocks"),
    "hf_flash": Contender("hugging_face", "--attention flash", layer_seconds=4),
    "hf_flash_blocks": Contender("hugging_face", "--attention flash --compile blocks"),
    "hf_checkpointed": Contender("hugging_face", "--compile blocks --checkpoint full",
                                 instead_of=("hf", "hf_blocks", "hf_flash")),
    "hf_fp8": Contender("hugging_face", "--float8 tensorwise", layer_seconds=5),
    "documents_flex": Contender("torch_documents", "--documents flex --batches {batches}", layer_seconds=4),
    "documents_flex_blocks": Contender("torch_documents",
                                       "--documents flex --compile blocks --batches {batches}"),
    "documents_varlen": Contender("torch_documents", "--documents varlen --batches {batches}",
                                  layer_seconds=4),
    "documents_varlen_blocks": Contender("torch_documents",
                                         "--documents varlen --compile blocks --batches {batches}"),
    "torchtitan": Contender("torchtitan"),
    "torchtitan_fp8": Contender("torchtitan", "--float8 tensorwise"),
    "maxtext_unrolled": Contender("maxtext", "--loop unroll", layer_seconds=6),
    "maxtext_scanned": Contender("maxtext", "--loop scan", seconds=130),
    "plain_jax": Contender("plain_jax"),
    "attention": Contender(script="measure/attention_saving.py", seconds=60),
    # The masks and the float32 residual stream that Hugging Face's users get.
    "hf_default": Contender("hugging_face", "--residual float32 --masks whole", layer_seconds=4),
    "hf_autotune": Contender("hugging_face", "--mode max-autotune-no-cudagraphs", seconds=200),
    "hf_float32_residual": Contender("hugging_face", "--residual float32", layer_seconds=4),
    "torchtitan_whole": Contender("torchtitan", "--compile whole", layer_seconds=4),
    "torchtitan_float32_residual": Contender("torchtitan", "--residual float32"),
    "torchtitan_fp8_whole": Contender("torchtitan", "--float8 tensorwise --compile whole", layer_seconds=5),
    "torchtitan_fp8_rowwise": Contender("torchtitan", "--float8 rowwise"),
}
# fmt: on
OF_JAX = ("maxtext", "plain_jax")
"""Peers that run in this Python, not in the one that has PyTorch."""


@dataclasses.dataclass(frozen=True)
class Race(Row):
    """own: our contender. against: peers, to the fastest of which the ratio is. beside: others. extra:
    contenders of this row alone. timed: seconds of warm-up and timed, of a block; steps: in place of them."""

    own: str = "jaxthru"
    against: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    extra: dict[str, Contender] = dataclasses.field(default_factory=dict)
    timed: tuple[float, float] = (20.0, 20.0)
    steps: tuple[int, int] | None = None

    def contender(self, name: str) -> Contender:
        return self.extra.get(name) or CONTENDERS[name]

    def wanted(self, done: list[dict]) -> list[Block]:
        failed = {each["contender"] for each in done if "error" in each}
        first = [
            name
            for name in (self.own, *self.against, *self.beside)
            if failed.issuperset(self.contender(name).instead_of)
        ]
        order = [(1, name) for name in first] + [(2, name) for name in (self.own, *self.leaders(done))]
        return [Block(name, turn, self.seconds_of(name)) for turn, name in order]

    def seconds_of(self, name: str) -> float:
        """Returns about how long a block takes, its compilation included."""
        contender = self.contender(name)
        return contender.seconds + contender.layer_seconds * self.layers

    @functools.cached_property
    def layers(self) -> int:
        """The layers of the model."""
        return configuration.load(config_file(self.config), self.settings.split()).model.layers

    def leaders(self, done: list[dict]) -> list[str]:
        """Returns the peers that run again: the first that has not failed, while none has run."""
        once = {name: rates([each for each in done if each["round"] == 1], name) for name in self.against}
        fastest = max((rate for of in once.values() for rate in of), default=None)
        if fastest is None:
            failed = {each["contender"] for each in done if "error" in each}
            return [name for name in self.against if name not in failed][:1]
        return [name for name, of in once.items() if of and of[0] >= NEAR * fastest]

    def once(self, done: list[dict]) -> dict[str, float]:
        """Returns the peers of the ratio that one block is enough for, as its round has shown, and their rate
        in it over that of the fastest."""
        first = {name: of[0] for name in self.against if (of := rates(done, name))}
        again = self.leaders(done)
        return {
            name: rate / max(first.values()) for name, rate in first.items() if again and name not in again
        }

    def command(self, name: str, setup: Setup) -> list[str]:
        contender, config = self.contender(name), setup.config(self)
        files = {
            word: str(setup.file(self, packed=word == "batches"))
            for word in ("tokens", "batches")
            if f"{{{word}}}" in contender.arguments or (word == "tokens" and contender.peer)
        }
        micro = config.train.rows // config.train.microbatches
        words = shlex.split(contender.arguments.format(**files, micro=micro))
        if not contender.peer:
            script = [sys.executable, str(blocks.HERE / contender.script)]
            script += setup.words(self, *contender.settings.split())
            timing = ["--steps", *setup.steps(*self.steps)] if self.steps else setup.seconds(*self.timed)
            kept = ["--keep-compiled"] if "step" in contender.script else []
            return [*script, *words, *timing, *kept]
        words += setup.seconds(*self.timed)
        shape = harness.Shape.of(config.model).flags()
        if contender.peer in OF_JAX:
            python = sys.executable
        else:
            python = setup.torch_python
            words += ["--compile", "none"] if setup.tiny else []
            on_cpu = setup.tiny and contender.peer == "torch_documents"
            words += ["--documents", "mask"] if on_cpu else []  # the others have no backward pass there
        return [python, "-m", f"peers.{contender.peer}", *shape, "--tokens", files["tokens"], *words]

    def details(self, found: dict) -> str:
        of, peers = found["contenders"], [*self.against, *self.beside]
        table = comparison.table(
            of, [*self.products, self.own, *peers], found["fastest_peer"] or self.own, peers
        )
        once = [f"{name} ({rate:.3f} × the fastest)" for name, rate in found.get("once", {}).items()]
        return f"{table}\n\n1 block: {', '.join(once)}" if once else table

    def found(self, setup: Setup, done: list[dict]) -> dict:
        precision = "fp8" if "fp8" in self.settings else "bf16"
        every = (self.own, *self.against, *self.beside)
        # What times no step has no rate to be compared.
        steps = Contender.script
        names = {name: precision if self.contender(name).script == steps else None for name in every}
        needed = needed_flops(setup.config(self))
        peak = hardware.data_sheet_flops(comparison.device_kind(done))
        names |= {name: name.removeprefix("gemm_") for name in self.products}
        found = comparison.rows(done, names, needed, peak)
        best = comparison.best_peer(found, self.leaders(done), precision)
        own = found.get(self.own, {})
        of_both = [found[name]["spread"] for name in (self.own, best) if name in found]
        told = {
            "contenders": found,
            "tokens_per_second": own.get("tokens_per_second"),
            "spread": None if None in of_both else max(of_both, default=None),
            "fastest_peer": best,
            "once": self.once(done),
        }
        if own.get("tokens_per_second") and best:
            told |= comparison.ratio(own, found[best])
        return told
