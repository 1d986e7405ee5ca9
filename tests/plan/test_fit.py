"""What is refused before any data is prepared."""

import jax
import pytest

from jaxthru import config as configuration
from jaxthru.plan.fit import fit
from jaxthru.runtime.errors import InputError


def test_bfloat16_on_several_cpu_devices_is_refused_where_xla_would_abort():
    config = configuration.load("configs/quickstart.py", ["precision.compute=bfloat16", "train.rows=8"])
    fit(config, jax.devices()[:1])
    with pytest.raises(InputError, match=r"precision.compute = 'bfloat16': on 2 CPU devices .* 'float32'"):
        fit(config, jax.devices()[:2])
