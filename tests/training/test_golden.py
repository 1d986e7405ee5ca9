"""Recorded numbers: a change that claims no numeric effect leaves them as they are.

`python scripts/golden.py keep` records them anew, on purpose; `scripts/golden.py compare` compares two commits on
one machine, to the bit.
"""

import numpy as np
import pytest
from cases import named, slow_but_for
from recording import CASES, KEPT, has_rounding, kept, words_of
