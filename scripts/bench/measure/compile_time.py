"""Times compiling a step for a GPU that need not be here, and says its peaks: prints one JSON line.

    python scripts/bench/measure/compile_time.py --config FILE [--set a.b=v ...] [--tree build/old]

As `python -m jaxthru.plan memory` does, without the compilation cache: tracing, lowering, XLA without
autotuning, and reading what it says of memory. --tree has the code and the configuration of another commit's
files. Needs "jaxthru[aot]". The suite `commits` runs it for two commits in turns.
"""

import importlib
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import harness
import jax
from commit_trees import Tree


def measure(arguments) -> dict:
    # An editable install would find in its own tree what another commit does not have.
    sys.meta_path = [finder for finder in sys.meta_path if "editable" not in finder.__module__]
    sys.path.append(str(harness.ROOT))
    jax.config.update("jax_enable_compilation_cache", False)
    names = ("config", "plan.__main__", "runtime.aot", "runtime.xla")
    with Tree(arguments.tree.resolve())():
        configuration, plan, aot, xla = (importlib.import_module(f"jaxthru.{name}") for name in names)
        xla.configure()
        aot.use_cpu(1)
        path = arguments.tree / Path(arguments.config).resolve().relative_to(harness.ROOT)
        config, target = configuration.load(str(path), arguments.overrides), aot.target("h200")
        aot.available()
        began = time.perf_counter()
        planned, _ = plan._plan(config, target, 1, arguments.documents)
        seconds = round(time.perf_counter() - began, 2)
    return {"compile_seconds": seconds, "peak_device": planned.peak_device, "peak_host": planned.peak_host}


main = harness.program(
    __doc__,
    measure,
    harness.option("--documents", type=int, default=12, help="in a row"),
    harness.option("--tree", type=Path, default=harness.ROOT, metavar="FOLDER"),
)

if __name__ == "__main__":
    sys.exit(main())
