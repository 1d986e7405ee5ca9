"""Do two commits make the same programs of collective matrix products? Needs no GPU; prints one JSON line.

    python scripts/bench/collective_matmul_same.py --old build/old [--old-commit NAME] [--output FILE]

Each call of every shape, forward and backward, by the fused kernels, the plain form and the ring, is lowered
for CUDA on two devices, with the tiles that an H200 takes. A kernel's program holds the name of the file that
it comes from: both trees are taken by links whose names are equally long, and the names are left out.
"""

import argparse
import functools
import hashlib
import importlib
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FORMS = {"fused": "mosaic_gpu", "plain": "reference", "ring": "ring"}


def digests(folder: str, few: bool = False) -> dict[str, str]:
    """Returns {"shape direction form": digest of its program} by the kernels that this process imports, which
    are those of a tree. few: of one shape alone."""
    import jax
    from jax.sharding import AxisType

    from pallas_kernels.collective_matmul.shapes import GPU, UNTUNED

    jax.config.update("jax_traceback_in_locations_limit", 0)  # lines move where nothing else changes
    mesh = jax.make_mesh((2,), ("tensor",), (AxisType.Auto,), devices=jax.devices()[:2])
    found = {}
    for name, shape in list((GPU | UNTUNED).items())[: 1 if few else None]:
        operands, results = shape.arrays(mesh, jax.numpy.bfloat16)
        n = len(shape.columns)
        for direction, (form, module) in ((d, f) for d in ("forward", "backward") for f in FORMS.items()):
            kernels = importlib.import_module(f"pallas_kernels.collective_matmul.{module}")
            assert kernels.__file__.startswith(folder), kernels.__file__
            options, back = {}, direction == "backward"
            if form == "fused":
                known = inspect.signature(kernels.tiles_for).parameters
                options = {"platform": "gpu"} | {word: True for word in ("named", "always") if word in known}
            call = getattr(kernels, shape.operation + ("_backward" if back else ""))
            call = functools.partial(call, axis_name="tensor", **options)

            def local(x, *rest, call=call, shape=shape, back=back, n=n):
                if shape.operation == "matmul_reduce_scatter":
                    return call(x, *rest) if back else (call(x, *rest),)
                if not back:
                    return call(x, rest)
                dx, dws = call(x, rest[:n], rest[n:])
                return dx, *dws

            takes, gives = (operands + results, operands) if back else (operands, results)
            specs = [tuple(x.sharding.spec for x in of) for of in (takes, gives)]
            run = jax.shard_map(local, mesh=mesh, in_specs=specs[0], out_specs=specs[1], check_vma=False)
            text = jax.jit(run).trace(*takes).lower(lowering_platforms=("cuda",)).as_text()
            text = re.sub(r'kernel_hash = "[^"]*"', "", text).replace(folder, "")
            found[f"{name} {direction} {form}"] = hashlib.sha256(text.encode()).hexdigest()[:16]
    return found


def of_tree(link: Path, few: bool) -> dict[str, str]:
    """Returns the digests of a tree, by a process that imports its kernels."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    environment = os.environ | {"PYTHONPATH": str(link), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    command = [sys.executable, __file__, "--digests", str(link), *(["--few"] if few else [])]
    said = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(said.splitlines()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--old", type=Path, metavar="FOLDER", help="the other commit's files")
    parser.add_argument("--old-commit", default="", help="its name, for the record")
    parser.add_argument("--few", action="store_true", help="one shape alone, to try it")
    parser.add_argument("--digests", metavar="FOLDER", help="only print those of the kernels that lie there")
    parser.add_argument("--output", type=Path, help="also write the JSON to this file")
    options = parser.parse_args()
    if options.digests:
        print(json.dumps(digests(options.digests, options.few)))
        return 0
    import harness

    with tempfile.TemporaryDirectory() as folder:
        links = {name: Path(folder) / name for name in ("old", "new")}
        for link, tree in zip(links.values(), (options.old.resolve(), ROOT), strict=True):
            link.symlink_to(tree, target_is_directory=True)
        old, new = (of_tree(link, options.few) for link in links.values())
    line = {"benchmark": "collective_matmul_same", "old_commit": options.old_commit, "programs": new}
    line["different"] = [name for name in new if old.get(name) != new[name]]
    harness.emit(line | harness.provenance(), options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
