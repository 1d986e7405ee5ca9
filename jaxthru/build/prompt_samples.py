"""What continues the prompts of an evaluation (`evaluate.prompts`) with the model that is trained."""

from pathlib import Path

import jax

from jaxthru.build.checks import offloaded
from jaxthru.config import RunConfig
from jaxthru.data.loading.host_pool import RunData
from jaxthru.engine.model import Model
from jaxthru.huggingface.generation_config import read_generation_defaults
from jaxthru.runtime.errors import require
from jaxthru.training.samples import Samples


def samples_of(config: RunConfig, model: Model, data: RunData) -> Samples | None:
    """Returns what makes samples of `evaluate.prompts`, None without them. Raises InputError for a prompt
    that is too long, or parameters in host memory that have no room beside a step."""
    if not config.evaluate.prompts:
        return None
    which = f"evaluate.prompts = {config.evaluate.prompts!r}"
    require(jax.process_count() == 1, f"{which}: are continued by a run of one process alone; leave them out")
    memory = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    if config.offload.layered and memory:
        size = model.parameters * model.ops.compute.itemsize / model.ops.layout.mesh.size
        said = (
            f"{which}: with {offloaded(config)} the whole model is fetched for them, and {size / 2**30:.1f}"
        )
        require(
            size < memory / 2,
            f"{said} GiB have no room beside a step; use `python -m jaxthru.generate` on a checkpoint",
        )
    base = Path(config.model.pretrained or "").expanduser()
    stop = read_generation_defaults(base).stop if config.model.pretrained else ()
    return Samples(config.evaluate, model, data.tokenizer, config.model.longest, config.train.seed, stop)
