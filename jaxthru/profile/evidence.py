"""What advice goes by: a ledger, the configuration that it was run with, and what follows from both."""

import dataclasses
import re
from typing import Any

from jaxthru.models.kernels import KernelsConfig
from jaxthru.profile.ledger import Ledger
from jaxthru.runtime.aot import TARGETS
from jaxthru.runtime.mesh import MeshConfig

MEMORY_SPARED = 0.05  # of a device's memory, kept free for what is not predicted


@dataclasses.dataclass(frozen=True)
class Evidence:
    """A ledger and what it was run with. config: nested plain values of config.json."""

    ledger: Ledger
    config: dict[str, Any]

    def __getitem__(self, key: str) -> Any:
        """Returns the value of `group.key`."""
        group, _, name = key.partition(".")
        return self.config[group][name]

    def line(self, name: str) -> float:
        return self.ledger.seconds(name)

    def scoped(self, phase: str, line: str) -> float:
        """Returns the seconds of a line in one phase."""
        found = (scope.seconds for scope in self.ledger.scopes if (scope.phase, scope.line) == (phase, line))
        return sum(found)

    def painted(self, line: str, seconds: float) -> float:
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
    def tensor(self) -> int:
        """The devices that a layer's matrices are split over."""
        return self._mesh[2]

    @property
    def fsdp(self) -> int:
        """The devices that a layer's matrices are gathered from."""
        return self._mesh[1]

    @property
    def fused_fits(self) -> bool:
        """Says whether `kernels.collective_matmul=fused` is not chosen yet, on a mesh where it pays."""
        alone = self.tensor == self.ledger.run.devices and self.ledger.run.processes == 1
        bf16 = self["precision.compute"] == "bfloat16" and self["precision.matmul"] != "fp8"
        written = KernelsConfig(**self.config["kernels"]).writes_to_peers
        return alone and bf16 and not written and not self.layered

    @property
    def _mesh(self) -> tuple[int, int, int]:
        return MeshConfig(**self.config["mesh"]).shape(self.ledger.run.devices)

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

    def widths(self) -> dict[str, float]:
        names = ("embed", "heads", "kv_heads", "head_dim", "mlp")
        shape = {name: self[f"model.{name}"] for name in names}
        return shape | {
            "query": shape["heads"] * shape["head_dim"],
            "key": shape["kv_heads"] * shape["head_dim"],
        }

    def gathered_bytes(self) -> float:
        """Returns the bytes of all layers' matrices on a device, once they are gathered."""
        width = self.widths()
        each = width["embed"] * (2 * width["query"] + 2 * width["key"] + 3 * width["mlp"])
        return each * self.item * self["model.layers"] / self.tensor

    @property
    def item(self) -> int:
        """Bytes of a number in the compute dtype."""
        return 2 if self["precision.compute"] == "bfloat16" else 4

    def recomputed(self, policy: str) -> float:
        """Returns the matmul width that a layer's backward pass computes again for each of `embed` inputs."""
        width = self.widths()
        recomputed = {"projections": 0.0, "gate": width["mlp"], "attention": 2 * width["mlp"], "none": 0.0}
        return recomputed.get(policy, 2 * width["mlp"] + 2 * width["query"] + 2 * width["key"])

    def kept(self, policy: str) -> float:
        """Returns the bytes that a policy keeps on a device beyond those of the policy now."""
        width = self.widths()
        attention = 2 * width["query"] + 2 * width["key"] + width["embed"]
        kept = {"full": 0.0, "attention": attention, "gate": attention + width["mlp"]}
        kept["projections"] = kept["gate"] + width["mlp"]
        kept["none"] = kept["projections"] + 3 * width["embed"] + 2 * width["mlp"]  # norms, products
        each = kept[policy] - kept[self["remat.policy"]]
        return each * self.item * self["model.layers"] * self.tokens_at_once / self.tensor
