"""Recorded losses: a change that claims no numeric effect leaves them as they are."""

import json
from pathlib import Path

import numpy as np
import tiny

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "tiny_losses.json"


def test_losses_are_those_recorded():
    """To 1e-4: processors differ in the order of their sums. To record anew, on purpose:
    `python -c "import tiny, json; print(json.dumps(tiny.make().losses(20)))" > golden/tiny_losses.json`
    from tests/.
    """
    np.testing.assert_allclose(tiny.make().losses(20), json.loads(GOLDEN.read_text()), atol=1e-4, rtol=0)
