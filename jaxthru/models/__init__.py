"""Model architectures, their parameters as plain trees, and their FLOP counts."""

import sys

if "IPython" not in sys.modules:
    # Flax would import it, in a fifth of a second, to ask whether a notebook runs: here none does.
    sys.modules["IPython"] = None  # type: ignore[assignment]
    try:
        import flax.nnx  # noqa: F401
    finally:
        del sys.modules["IPython"]
