"""The facts of a run behind advice: its ledger, its configuration, and what follows from both."""

import dataclasses
import re
from typing import Any

from jaxthru.build.defaults import AUTO
from jaxthru.models.kernels import KernelsConfig
from jaxthru.models.layers import PrecisionConfig
from jaxthru.profile.account.ledger import Ledger
from jaxthru.runtime.aot import TARGETS
from jaxthru.runtime.mesh import shape_of

MEMORY_SPARED = 0.05  # of a device's memory, kept free for what is not predicted


@dataclasses.dataclass(frozen=True)
class RunFacts:
    """A ledger and what it was run with. config: nested plain values of config.json."""

    ledger: Ledger
    config: dict[str, Any]

    def __getitem__(self, key: str) -> Any:
        """Returns the value of `group.key`."""
        group, _, name = key.partition(".")
        value = self.config[group][name]
        return AUTO.get(key, value) if value == "auto" else value  # of a run that chose nothing

    def line(self, name: str) -> float:
        return self.ledger.seconds(name)

    def scoped(self, phase: str, line: str) -> float:
        """Returns the seconds of a line in one phase."""
        found = (scope.seconds for scope in self.ledger.scopes if (scope.phase, scope.line) == (phase, line))
        return sum(found)

    def within_line(self, line: str, seconds: float) -> float:
        """Returns what kernels' own seconds are in the line, of which overlapping ones share a moment."""
        own = sum(kernel.seconds for kernel in self.ledger.kernels if kernel.line == line)
        return min(seconds * min(1.0, self.line(line) / own) if own else seconds, self.line(line))

    def exposed(self, *kinds: str) -> float:
        """Returns the exposed seconds of all collectives of these kinds."""
        return sum(each.exposed_seconds for each in self.ledger.collectives if each.kind in kinds)

    @property
    def layered(self) -> bool:
        """Says whether the host dispatches the layers one by one."""
        return self["offload.level"] != "none" or self["offload.activations"] != "none"

    @property
    def gpu(self) -> bool:
        return self.ledger.run.platform in ("gpu", "cuda", "rocm")

    @property
    def float8(self) -> bool:
        """Says whether linear layers are multiplied in float8, be it those of an adapter's base alone."""
        lora = self.config.get("lora", {})
        by_base = bool(lora.get("rank")) and lora.get("base") == "fp8"
        return by_base or PrecisionConfig(matmul=self["precision.matmul"]).float8

    @property
    def tensor(self) -> int:
        """The devices that a layer's matrices are split over."""
        return self.mesh["tensor"]

    @property
    def fused_fits(self) -> bool:
        """Says whether `kernels.collective_matmul=fused` is not chosen yet, on a mesh where it pays."""
        alone = self.tensor == self.ledger.run.devices and self.ledger.run.processes == 1
        bf16 = self["precision.compute"] == "bfloat16" and not self.float8
        written = KernelsConfig(**self.config["kernels"]).writes_to_peers
        return alone and bf16 and not written and not self.layered

    @property
    def mesh(self) -> dict[str, int]:
        """The devices along each axis of the mesh."""
        return shape_of(self.config["mesh"], self.ledger.run.devices)

    @property
    def tokens_at_once(self) -> float:
        """Tokens of a micro-batch on one device."""
        shards = max(1, self.ledger.run.devices // self.tensor)
        return self.ledger.run.tokens_per_step / shards / self["train.microbatches"]

    @property
    def unused_bytes(self) -> float | None:
        """Device memory that the run never used, less what is spared; None where either is not known."""
        kind, memory = self.ledger.run.device_kind.lower(), self.ledger.memory
        sizes = (target.memory for name, target in TARGETS.items() if re.search(rf"\b{name}\b", kind))
        size = next(sizes, None)
        if size is None or memory is None or memory.peak_bytes is None:
            return None
        return max(0.0, size * (1 - MEMORY_SPARED) - memory.peak_bytes)

    def gathered_bytes(self) -> float:
        """Returns the bytes of all layers' matrices on a device, once they are gathered."""
        item = 2 if self["precision.compute"] == "bfloat16" else 4
        return self.ledger.model.layer_parameters * item / self.tensor

    def kept(self, policy: str) -> float:
        """Returns the bytes that a policy keeps on a device beyond those of the policy now."""
        kept = self.ledger.model.kept
        return (kept[policy] - kept[self["remat.policy"]]) * self.tokens_at_once / self.tensor
