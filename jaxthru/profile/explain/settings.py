"""What moves each part of the step: one table, by which advice is given and changes are explained."""

from typing import NamedTuple

BATCH = ("train.rows", "train.microbatches", "train.deterministic")
SHAPE = ("model.", *BATCH, "data.sequence")
UPDATE = ("optim.name", "optim.state", "optim.clip")
SETTINGS = {
    "ideal": (*SHAPE, "mesh."),
    "recomputation": ("remat.", "data.packing"),
    "frequency": ("precision.",),
    "inefficiency": (*SHAPE, "mesh.", "precision."),
    "matmul": (*SHAPE, "mesh.", "precision.", "remat."),
    "attention": (*SHAPE, "remat.", "data.packing", "data.mix", "kernels.attention"),
    "collective_matmul": (*SHAPE, "mesh.", "kernels.collective_matmul"),
    "other_kernels": (*SHAPE, *UPDATE, "remat.", "precision.", "kernels."),
    "exposed_communication": (
        *("mesh.", *BATCH, "optim.clip_rule", "data.balance", "remat.keep_parameters"),
        "kernels.collective_matmul",
    ),
    "exposed_host_copies": ("offload.", *UPDATE, "train.rows"),
    "data_wait": ("data.", "train.rows"),
    "host_gap": ("offload.", *BATCH, "checkpoint.", "evaluate.", "metrics.", "model.loop"),
    "dependency": ("model.loop", "offload.", "mesh.", *BATCH),
}
"""Part -> keys of the configuration, or groups of them, that move it. Advice on a part names one of these, and a
change of one explains a change of the part."""


class Finding(NamedTuple):
    """parts: that what was found moves. line: the one whose seconds a repair wins, None where it wins memory or
    it is not known. key, value: of the advice. remedy: what to do."""

    parts: tuple[str, ...]
    line: str | None
    key: str
    value: str
    remedy: str


FINDINGS = {
    "float32_matmuls": Finding(
        *(("matmul",), "matmul", "precision.compute", "bfloat16"),
        "Cast its operands to the compute type.",
    ),
    "not_donated": Finding(
        *((), None, "donate_argnums", "the state"),
        "Donate it, so that the result takes its memory.",
    ),
    "collectives": Finding(
        *(("exposed_communication",), "exposed_communication", "mesh", "its operands' axes"),
        "State its operands' sharding.",
    ),
    "attention_again": Finding(
        *(("recomputation", "attention"), "attention", "remat.policy", "attention"),
        "Keep the attention kernel's results.",
    ),
    "copies": Finding(
        *(("other_kernels",), "other_kernels", "layout", "that of the producer"),
        "Avoid the layout that needs the copy.",
    ),
    "loops": Finding(
        *(("dependency", "host_gap"), None, "model.loop", "scan"),
        "Give the loop a length that is known when it is compiled.",
    ),
}
"""Lint rule -> what its findings cost, and what to do about them."""
