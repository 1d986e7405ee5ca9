"""Checks on the devices before training starts: attention against its reference."""

import jax

from jaxthru.engine.model import Model
from jaxthru.runtime.distributed import gather_text
from jaxthru.runtime.errors import TrainingError
from pallas_kernels.attention import automatic
from pallas_kernels.attention.check import TOLERANCE, differences


def wrong_attention(model: Model, rows: int, sequence: int, max_segments: int) -> str:
    """Compares each kind of attention that is to run with the dense-mask reference, on a small shape, and
    returns how far this process's device is off it, empty if no further than TOLERANCE.

    A kernel library of another version might go wrong in silence; a run is not to be lost to that. On a CPU,
    where no such library is used, nothing is done.

    rows: of a micro-batch, over all devices. sequence: tokens in a row. max_segments: most in a row.
    """
    if jax.default_backend() == "cpu":
        return ""
    ops, wrong = model.ops, []
    for heads, kv_heads, head_dim, window in model.attention_shapes(rows, sequence):
        # Which kernel is taken depends on the sizes of the run: those of the check would choose another.
        shards = ops.layout.size("batch") * ops.layout.size("heads")
        elements = rows * sequence * heads * head_dim // shards
        errors = differences(
            heads,
            kv_heads,
            head_dim,
            ops.compute,
            packed=max_segments > 1,
            window=window,
            implementation=automatic(elements, max_segments, width=head_dim)
            if ops.attention_by == "auto"
            else ops.attention_by,
        )
        if max(errors.values()) > TOLERANCE:
            kind = "" if window is None else f" (window {window})"
            wrong += [f"{name} {error:.1e}{kind}" for name, error in errors.items()]
    return ", ".join(wrong)


def agree_on_attention(model: Model, wrong: str) -> None:
    """Raises TrainingError, in all processes, if attention was found wrong in any: a host may be alone with
    it, and none can train without the others. wrong: as `wrong_attention` found it here."""
    for process, found in enumerate(gather_text(wrong)):
        if found:
            raise TrainingError(
                f"kernels.attention = {model.ops.attention_by!r}: on the {jax.devices()[0].device_kind} of "
                f"process {process} it is off its reference by {found}, above {TOLERANCE:.0e}; choose another"
            )


def check_attention(model: Model, rows: int, sequence: int, max_segments: int) -> None:
    """Raises TrainingError if attention is wrong on a device of any process, see `wrong_attention`."""
    agree_on_attention(model, wrong_attention(model, rows, sequence, max_segments))
