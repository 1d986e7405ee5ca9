"""Fabrics, what connects the devices of a job: read from TOML, checked, and laid under the devices."""

import dataclasses
import functools
import math
from pathlib import Path
from typing import Literal

import numpy as np

from jaxthru.data.sources.toml_file import home, read_toml
from jaxthru.runtime import plain
from jaxthru.runtime.errors import did_you_mean, require

SHIPPED = Path(__file__).with_name("fabrics")

Hash = Literal["five_tuple", "dest_qp", "spray", "adaptive"]


@dataclasses.dataclass(frozen=True)
class Fabric:
    """A cluster: hosts whose GPUs share NVLink, NICs and a leaf-spine network of switches; or a TPU torus.

    Rates are Gbit/s, one way. device: what its devices are, a name of `plan --device`. hosts: of the cluster,
    of which a job has some. nvlink_gbps: of a GPU. nvlink_hosts: neighbours that share an NVLink domain.

    nics_per_host, nic_gbps: a GPU sends by the NIC of its share; of several a GPU, give one of their sum.
    rails: NIC i of all hosts of a pod is on one leaf; else all NICs of a host are. leaves, ports_per_leaf:
    switches, and their ports to NICs. Each of uplinks_per_leaf leads to a spine of its own, at uplink_gbps
    (0: a NIC's). hash: what a leaf picks the uplink by: `five_tuple`, the same for all queue pairs of two
    NICs; `dest_qp` (E-ECMP), each queue pair's own; `spray` and `adaptive`, packet by packet, which loads all
    uplinks alike. qps, channels: queue pairs of a connection, and connections that two NICs have at once.
    placement: hosts of a job are neighbours, or any of the cluster. algorithm: over hosts a flat `ring`, or
    `two_level`, which sends each byte to a host once. efficiency: share of a link's rate that data gets, of
    NVLink nvlink_efficiency.

    launch_us: of a collective, beside its hops, nvlink_hop_us and network_hop_us each (NCCL's tuner, Simple).

    torus: devices along each dim, of a TPU slice, the first dim's numbered first; link_gbps: of a link, one
    way. wrap: whether its ends are joined.
    """

    name: str = ""
    description: str = ""
    device: str = "h200"
    hosts: int = 1
    gpus_per_host: int = 8
    nvlink_gbps: float = 3600.0
    nvlink_hosts: int = 1
    nvlink_efficiency: float = 0.61
    nics_per_host: int = 8
    nic_gbps: float = 400.0
    rails: bool = False
    leaves: int = 1
    ports_per_leaf: int = 0
    uplinks_per_leaf: int = 0
    uplink_gbps: float = 0.0
    hash: Hash = "dest_qp"
    qps: int = 1
    channels: int = 1
    placement: Literal["packed", "random"] = "packed"
    algorithm: Literal["ring", "two_level"] = "ring"
    efficiency: float = 0.8
    launch_us: float = 46.6
    nvlink_hop_us: float = 3.4
    network_hop_us: float = 14.0
    torus: tuple[int, ...] = ()
    link_gbps: float = 0.0
    wrap: bool = True

    def __post_init__(self):
        counts = ("hosts", "gpus_per_host", "nvlink_hosts", "nics_per_host", "leaves", "qps", "channels")
        for key in counts:
            self._require(key, getattr(self, key) >= 1, "must be at least 1")
        for key in ("efficiency", "nvlink_efficiency"):
            self._require(key, 0 < getattr(self, key) <= 1, "must be a share, above 0 and at most 1")
        for key in ("uplink_gbps", "launch_us", "nvlink_hop_us", "network_hop_us", "link_gbps"):
            self._require(key, getattr(self, key) >= 0, "must not be negative")
        for key in ("nvlink_gbps", "nic_gbps"):
            self._require(key, getattr(self, key) > 0, "must be above 0")
        if self.torus:
            self._require("torus", min(self.torus) >= 1, "must have sizes of at least 1")
            self._require("link_gbps", self.link_gbps > 0, "must be above 0 for a torus")
            return
        whole = self.gpus_per_host % self.nics_per_host == 0
        self._require("nics_per_host", whole, f"must divide gpus_per_host = {self.gpus_per_host}")
        if self.leaves == 1:
            return
        many = f"with leaves = {self.leaves}"
        self._require("uplinks_per_leaf", self.uplinks_per_leaf >= 1, f"{many} it must be at least 1")
        least = 1 if self.rails else self.nics_per_host
        said = f"{many} a host's {'NIC needs one port' if self.rails else f'{least} NICs need as many ports'}"
        self._require("ports_per_leaf", self.ports_per_leaf >= least, f"{said} of a leaf")
        self._require("hosts", self.hosts <= self.room, f"{self.leaves} leaves hold {self.room} at most")

    def _require(self, key: str, holds: bool, why: str) -> None:
        where = f"fabric {self.name}: " if self.name else "fabric: "
        require(holds, lambda: f"{where}{key} = {getattr(self, key)}: {why}")

    @property
    def room(self) -> int:
        """The hosts that the leaves hold."""
        if self.rails:
            return self.leaves // self.nics_per_host * self.ports_per_leaf
        return self.leaves * (self.ports_per_leaf // self.nics_per_host)

    @property
    def devices(self) -> int:
        """The devices of the whole cluster."""
        return math.prod(self.torus) if self.torus else self.hosts * self.gpus_per_host

    @property
    def flows(self) -> int:
        """The flows between two NICs that switches tell apart."""
        return self.channels * self.qps if self.hash == "dest_qp" else 1

    @property
    def spreads(self) -> bool:
        """Whether all uplinks of a leaf carry the same."""
        return self.hash in ("spray", "adaptive")

    @property
    def nic(self) -> float:
        """Bytes/s that a NIC moves, one way."""
        return self.nic_gbps / 8 * 1e9 * self.efficiency

    @property
    def uplink(self) -> float:
        """Bytes/s that an uplink moves, one way."""
        return (self.uplink_gbps or self.nic_gbps) / 8 * 1e9 * self.efficiency

    @property
    def nvlink(self) -> float:
        """Bytes/s that a GPU moves over NVLink, one way."""
        return self.nvlink_gbps / 8 * 1e9 * self.nvlink_efficiency

    @property
    def link(self) -> float:
        """Bytes/s that a link of the torus moves, one way."""
        return self.link_gbps / 8 * 1e9 * self.efficiency

    @property
    def oversubscription(self) -> float:
        """What the NICs of a full leaf send over what its uplinks carry; 0 where one switch holds all."""
        if self.torus or self.leaves == 1:
            return 0.0
        return self.ports_per_leaf * self.nic / (self.uplinks_per_leaf * self.uplink)


def load(given: str, changes: tuple[str, ...] | list[str] = ()) -> Fabric:
    """Returns the fabric of a `.toml` path or of a name that is shipped, with each `key=value` of `changes`.

    Raises InputError for a file that is not there, an unknown key, and what no network can be like.
    """
    path = _find(given)
    tree = {**read_toml(path), **_changed(changes)}
    plain_keys = [name for name in plain.fields(Fabric) if name != "name"]
    for key in tree:
        plain.check_key(key, plain_keys, where=f"{path.name}: ")
    return plain.build(Fabric, {"name": path.stem, **tree}, f"{path.name}: ")


def shipped() -> list[str]:
    """Returns the names of the fabrics that are shipped."""
    return sorted(path.stem for path in SHIPPED.glob("*.toml"))


def _find(given: str) -> Path:
    path = home("--fabric", given)
    if path.is_file():
        return path
    require(path.suffix != ".toml", f"--fabric {given}: no such file")
    require(given in shipped(), lambda: f"--fabric {given}: no such fabric{did_you_mean(given, shipped())}")
    return SHIPPED / f"{given}.toml"


def _changed(changes: tuple[str, ...] | list[str]) -> dict:
    found = {}
    for change in changes:
        key, equals, text = change.partition("=")
        require(bool(equals), f"--fabric-set {change}: write KEY=VALUE")
        found[key] = plain.parse(f"fabric.{key}", text, plain.field(Fabric, key, "fabric.", text))
    return found


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where a job's devices are. All arrays are int64 [devices]: host, domain (of NVLink), nic (of all NICs
    of the cluster), leaf (of that NIC)."""

    host: np.ndarray
    domain: np.ndarray
    nic: np.ndarray
    leaf: np.ndarray


@functools.lru_cache(maxsize=8)
def placed(fabric: Fabric, devices: int, seed: int = 0) -> Placement:
    """Returns where the devices of a job are. seed: of `random` placement. Raises InputError where the fabric
    does not hold them."""
    need = -(-devices // fabric.gpus_per_host)
    require(
        devices <= fabric.devices,
        f"--devices {devices}: fabric {fabric.name} has {fabric.hosts} hosts of {fabric.gpus_per_host}, and "
        f"these need {need}",
    )
    require(
        devices < fabric.gpus_per_host or devices % fabric.gpus_per_host == 0,
        f"--devices {devices}: must be whole hosts of {fabric.gpus_per_host}",
    )
    hosts = np.arange(need)
    if fabric.placement == "random":
        hosts = np.random.default_rng(seed).permutation(fabric.hosts)[:need]
    local = np.arange(devices) % fabric.gpus_per_host
    host = hosts[np.arange(devices) // fabric.gpus_per_host]
    own = local * fabric.nics_per_host // fabric.gpus_per_host
    if fabric.leaves == 1:
        leaf = np.zeros(devices, np.int64)
    elif fabric.rails:
        leaf = host // fabric.ports_per_leaf * fabric.nics_per_host + own
    else:
        leaf = host // (fabric.ports_per_leaf // fabric.nics_per_host)
    return Placement(host, host // fabric.nvlink_hosts, host * fabric.nics_per_host + own, leaf)
