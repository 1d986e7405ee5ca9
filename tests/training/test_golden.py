"""Recorded numbers: a change that claims no numeric effect leaves them as they are.

`python scripts/golden.py keep` records them anew, on purpose. `python scripts/golden.py compare OLD NEW`
compares two commits on one machine, to the bit.
"""

import numpy as np
from cases import named, slow_but_for
from recording import CASES, KEPT, kept, precision, words_of

TOLERANCES = {
    "float32": {"losses": 5e-6, "norms": 1e-4, "gradients": 2e-5, "weights": 3e-4},
    "state": {"losses": 5e-4, "norms": 1e-2, "gradients": 2e-5, "weights": 1e-2},
    "products": {"losses": 2e-2, "norms": 0.4, "gradients": 0.2, "weights": 0.6},
}
"""Three to ten times what one core instead of two, and XLA's optimisation instead of none, were seen to
change: processors differ in the order of their sums as these do. Where products are rounded to 3 or 7 bits,
or a state to 7, a difference in float32's last bit sometimes becomes one of those."""

FAST = ("scan",)
SLOW = (
    *("muon", "state int8"),
    *("rope scaling", "previous clipping", "wsd, no clipping", "muon, unroll, qk_norm", "state bfloat16"),
    *("state split_master_int8", "state stochastic_rounding", "fp8, unroll, 2 micro-batches", "bf16"),
    *("mesh (2,2,2)", "z-loss, 2 micro-batches", "offload parameters, names, half, tied, 2 micro-batches"),
)
"""Of the others, which `python scripts/golden.py compare` runs, tests elsewhere say that they equal one of
these: other loops, micro-batches, meshes, levels of offload and what is recomputed."""


@slow_but_for(*FAST, slow=SLOW, minutes=0.12, case=named(*CASES))
def test_numbers_are_those_recorded(case):
    tolerances = TOLERANCES[precision(words_of(case))]
    with np.load(KEPT) as file:
        recorded = {key.partition("|")[2]: file[key] for key in file.files if key.startswith(f"{case}|")}
    found = kept(case)
    assert found.keys() == recorded.keys()
    for kind in ("losses", "norms"):
        np.testing.assert_allclose(found[kind], recorded[kind], rtol=tolerances[kind], atol=0, err_msg=kind)
    for kind in ("gradients", "weights"):
        assert found[f"{kind} leaves"].tolist() == recorded[f"{kind} leaves"].tolist()
        # In units of a leaf's greatest entry, of its norm for its sum, which may be of both signs.
        sums, entries = recorded[f"{kind} sums"], recorded[f"{kind} entries"]
        scales = np.stack([np.sqrt(sums[:, 1]), sums[:, 1]], 1), np.abs(entries).max(1, keepdims=True)
        for name, values, scale in zip(("sums", "entries"), (sums, entries), scales, strict=True):
            off = np.abs(found[f"{kind} {name}"] - values) / np.maximum(scale, 1e-30)
            worst = found[f"{kind} leaves"][np.unravel_index(off.argmax(), off.shape)[0]]
            assert off.max() <= tolerances[kind], f"{name} of {kind}: {worst} is {off.max():.1e} off"
