"""What is checked on the devices that are about to train, before they do."""

import jax

from jaxthru.models.bind import Model
from jaxthru.training.account import TrainingError
from pallas_kernels.attention.check import TOLERANCE, differences


def check_attention(model: Model, max_segments: int) -> None:
    """Compares the attention that is to run with the dense-mask reference, on a small shape.

    A kernel library of another version might go wrong in silence; a run is not to be lost to that. On a CPU,
    where no such library is used, nothing is done. Raises TrainingError if the two differ.
    """
    if jax.default_backend() == "cpu":
        return
    shape, ops = model.config, model.ops
    errors = differences(
        shape.heads,
        shape.kv_heads,
        shape.head_dim,
        ops.compute,
        packed=max_segments > 1,
        implementation=None if ops.attention_by == "auto" else ops.attention_by,
    )
    bound = TOLERANCE[ops.compute.name]
    if max(errors.values()) > bound:
        found = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
        raise TrainingError(
            f"model.attention = {ops.attention_by!r}: on this {jax.devices()[0].device_kind} it is off its "
            f"reference by {found}, above {bound:.0e}; choose another"
        )
