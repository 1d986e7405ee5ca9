"""Flags are checked before XLA sees them, and multicast stays off."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jaxlib import xla_client

from jaxthru.engine.model import Model
from jaxthru.models.kernels import KernelsConfig
from jaxthru.models.ops import Ops
from jaxthru.runtime import xla
from jaxthru.runtime.errors import InputError
from jaxthru.runtime.mesh import MeshConfig, make_mesh
from jaxthru.runtime.sharding import Layout
from pallas_kernels.testing import has_gpu


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--xla_force_host_platform_device_count=8",
        "--xla_gpu_enable_nccl_user_buffers=false",
        "--xla_gpu_experimental_use_collective_kernels=",
        "--xla_gpu_collective_permute_mode=peer",
    ],
)
def test_takes(flags):
    xla.check_flags(flags)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--xla_gpu_no_such_flag=true", "--xla_gpu_no_such_flag: unknown to jaxlib"),
        ("--xla_gpu_enable_latency_hiding=1", "unknown to jaxlib"),  # the beginning of a known one
        ("--xla_gpu_enable_nccl_user_buffers=true", "may use NVLink multicast"),
        ("--xla_gpu_enable_nccl_user_buffers", "may use NVLink multicast"),
        ("--xla_gpu_experimental_enable_nccl_symmetric_buffers=True", "may use NVLink multicast"),
        ("--xla_gpu_enable_persistent_symmetric_memory=1", "may use NVLink multicast"),
        ("--xla_gpu_all_gather_mode=symmetric", "may use NVLink multicast"),
        ("--xla_gpu_experimental_use_collective_kernels=ALL_REDUCE", "may use NVLink multicast"),
    ],
)
def test_refuses(flags, message):
    with pytest.raises(InputError, match=message):
        xla.check_flags(f"--xla_force_host_platform_device_count=8 {flags}")


def test_a_file_of_flags_is_read_as_xla_reads_it(monkeypatch, tmp_path):
    file = tmp_path / "flags"
    monkeypatch.setenv("XLA_FLAGS", str(file))
    with pytest.raises(InputError, match=r"flags: no file of flags .No such file or directory., and no flag"):
        xla.configure()
    file.write_text("--xla_force_host_platform_device_count=8\n--xla_gpu_enable_nccl_user_buffers=true\n")
    with pytest.raises(InputError, match="may use NVLink multicast"):
        xla.configure()
    file.write_text("--xla_force_host_platform_device_count=8\n")
    xla.configure()


@pytest.mark.parametrize(
    ("version", "fits"), [("0.11.2", True), ("0.12.9", True), ("0.11.0", False), ("0.13.0", False)]
)
def test_supported_versions_of_jax(monkeypatch, version, fits):
    monkeypatch.setattr(jax, "__version__", version)
    monkeypatch.setattr(xla, "keep_compiled", lambda directory: None)
    if fits:
        xla.configure()
    else:
        with pytest.raises(InputError, match=f"jax {version}: supported is jax>=0.11.2,<0.13"):
            xla.configure()


def test_multicast_is_off_whatever_the_environment_says():
    code = (
        "from jaxthru.runtime import xla; xla.configure(); import os\n"
        "print([os.environ[name] for name in sorted(xla.NO_MULTICAST)])"
    )
    environment = os.environ | {"NCCL_NVLS_ENABLE": "1", "XDG_CACHE_HOME": "/nonexistent"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "['0', '1', '1']", done.stderr


@pytest.mark.parametrize("name", [None, "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"])
def test_a_chosen_share_of_the_memory_stays(monkeypatch, name):
    for known in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.setenv(known, "1")  # noted, so that whatever is set meanwhile goes
        monkeypatch.delenv(known)
    if name:
        monkeypatch.setenv(name, "0.5")
    xla.configure()
    options = xla_client.generate_pjrt_gpu_plugin_options()
    assert options["memory_fraction"] == (0.5 if name else 0.96)


def test_programs_are_kept_apart_by_processor(monkeypatch, tmp_path):
    kept = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(xla, "keep_compiled", kept.append)
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    try:
        xla.configure()
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
    assert kept == [tmp_path / "jaxthru" / "xla" / xla.processor()]
    assert xla.processor() == xla.processor()


CUBLAS = {"xla_gpu_enable_triton_gemm": False}


def test_options_are_for_gpus_alone_and_where_they_help(monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    assert xla.compiler_options("cpu", devices=8, deterministic=True) == {}
    assert xla.compiler_options("gpu", devices=1, deterministic=False) == CUBLAS
    both = xla.compiler_options("gpu", devices=2, deterministic=True)
    assert both == CUBLAS | {
        "xla_gpu_enable_latency_hiding_scheduler": True,
        "xla_gpu_graph_min_graph_size": 1,
        "xla_gpu_experimental_use_collective_kernels": "",  # none of them
        "xla_gpu_deterministic_ops": True,
    }
    fused = xla.compiler_options("gpu", devices=1, deterministic=False, writes_to_peers=True)
    assert fused == CUBLAS | {
        "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUDNN",  # no custom calls
        "xla_gpu_graph_min_graph_size": 1,
        "xla_gpu_experimental_use_collective_kernels": "",
        "xla_gpu_disable_async_collectives": "ALLCOLLECTIVES",
    }
    assert (
        xla.compiler_options("cpu", devices=2, deterministic=False, writes_to_peers=True, copies=True) == {}
    )
    copied = xla.compiler_options("gpu", devices=2, deterministic=False, copies=True)
    assert copied["xla_gpu_collective_permute_mode"] == "COLLECTIVES_PEER_MEMORY"


def test_matmuls_are_cublas_s_unless_a_flag_says_otherwise(monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    assert xla.for_matmuls("gpu") == CUBLAS
    assert xla.for_matmuls("cpu") == xla.for_matmuls("tpu") == {}
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_triton_gemm=true")
    assert xla.for_matmuls("gpu") == {} == xla.compiler_options("gpu", devices=1, deterministic=False)


@pytest.mark.parametrize("peers", [False, True])
def test_code_is_loaded_before_kernels_wait_for_each_other(peers, monkeypatch):
    monkeypatch.delenv("CUDA_MODULE_LOADING", raising=False)
    xla.configure(writes_to_peers=peers)
    assert os.environ.get("CUDA_MODULE_LOADING") == ("EAGER" if peers else None)


def test_results_of_autotuning_are_read_by_all_and_written_by_the_first(monkeypatch, tmp_path):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    kept = CUBLAS | {"xla_gpu_per_fusion_autotune_cache_dir": str(tmp_path)}
    for primary, mode in ((True, "UPDATE"), (False, "READ")):
        monkeypatch.setattr(xla, "is_primary", lambda primary=primary: primary)
        options = xla.compiler_options("gpu", devices=1, deterministic=False, autotuned=tmp_path)
        kept["xla_gpu_experimental_autotune_cache_mode"] = f"AUTOTUNE_CACHE_MODE_{mode}"
        assert options == kept
    assert xla.compiler_options("cpu", devices=1, deterministic=True, autotuned=tmp_path) == {}


@pytest.mark.parametrize("given", ["", "--xla_dump_to=/nowhere --xla_a=1", "FILE"])
def test_every_process_is_given_its_own_flags_once(given, monkeypatch, tmp_path):
    monkeypatch.setattr(xla, "check_flags", lambda flags: None)
    if given == "FILE":
        (tmp_path / "flags").write_text("--xla_a=1\n--xla_b=2\n")
        monkeypatch.setenv("XLA_FLAGS", str(tmp_path / "flags"))
        given = "--xla_a=1 --xla_b=2"
    else:
        monkeypatch.setenv("XLA_FLAGS", given)
    for _ in range(2):  # once, however often it is called
        xla.configure()
        assert os.environ["XLA_FLAGS"].split() == [*given.split(), *xla.OWN_FLAGS]


@pytest.mark.parametrize("value", ["=true", ""])
def test_a_flag_that_is_given_is_not_given_again(value, monkeypatch):
    (name,) = xla.SMALLEST_GAP_FIRST
    monkeypatch.setenv("XLA_FLAGS", f"--{name}{value} --xla_force_host_platform_device_count=8")
    xla.configure()
    assert [flag for flag in os.environ["XLA_FLAGS"].split() if name in flag] == [f"--{name}{value}"]


def test_jaxlib_knows_what_every_process_is_given():
    xla.check_flags(" ".join(xla.OWN_FLAGS))


FILLS_ITS_GAP_AGAIN = """
from jaxthru.runtime import xla
xla.configure()
import jax, jax.numpy as jnp, numpy as np

def temporaries():
    return jnp.zeros((rows, 1 << 20), jnp.uint8).block_until_ready()

def small(size):
    return jax.device_put(np.zeros(size, np.uint8)).block_until_ready()

rows = jax.devices()[0].memory_stats()["bytes_limit"] * 7 // 10 >> 20
held = temporaries()
batch = small(1 << 20)
del held
metrics = small(256)
print(temporaries().shape[0] == rows)
"""


@pytest.mark.gpu
@pytest.mark.skipif(not has_gpu(), reason="no GPU")
def test_temporaries_fit_again_in_front_of_what_was_placed_beside_them():
    """In a process of its own, for XLA reads its flags once, beside what this one has taken."""
    known = {name: value for name, value in os.environ.items() if not name.startswith("XLA_")}
    share = {"XLA_CLIENT_MEM_FRACTION": "0.02", "XLA_PYTHON_CLIENT_PREALLOCATE": "true"}
    command = [sys.executable, "-c", FILLS_ITS_GAP_AGAIN]
    done = subprocess.run(command, env=known | share, capture_output=True, text=True)
    assert done.stdout.strip() == "True", done.stderr


def test_an_evaluation_has_the_collectives_of_its_step(monkeypatch):
    """Kernels that wait for their peers hang beside collectives that run when they like."""
    layout = Layout(make_mesh(MeshConfig(), jax.devices()[:2]))  # before XLA_FLAGS, which has how many, goes
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    for fused in ("none", "fused", "mosaic_gpu"):
        ops = Ops(layout, jnp.dtype(jnp.bfloat16), collective_matmul_by=fused, copies=fused == "none")
        how = {"writes_to_peers": KernelsConfig(collective_matmul=fused).writes_to_peers}
        of_step = xla.compiler_options("gpu", 2, False, copies=ops.copies, **how)
        found = Model(object(), ops, "none", "unroll").compiler_options()
        assert found == of_step and of_step.items() >= xla.NO_COLLECTIVE_KERNELS.items()


@pytest.mark.parametrize(("expert", "fenced"), [(1, False), (2, True)])
def test_arrays_of_divided_experts_do_not_outlive_their_use(expert, fenced, monkeypatch):
    layout = Layout(make_mesh(MeshConfig(expert=expert), jax.devices()[:2]))
    model = Model(object(), Ops(layout, jnp.dtype(jnp.bfloat16)), "none", "unroll")
    found = model.compiler_options(platform="gpu")
    assert (found.items() >= xla.FENCED.items()) == fenced == bool(found.keys() & xla.FENCED.keys())
    assert model.compiler_options() == {}  # a CPU's
    monkeypatch.setenv("XLA_FLAGS", f"--{min(xla.FENCED)}=1")
    assert not model.compiler_options(platform="gpu").keys() & xla.FENCED.keys()


def test_matmuls_are_not_joined_with_a_loop_s_stacks_unless_a_flag_says_so(monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    ops = Ops(Layout(make_mesh(MeshConfig(), jax.devices()[:1])), jnp.dtype(jnp.bfloat16))
    looped, unrolled = (Model(object(), ops, "none", loop) for loop in ("scan", "unroll"))
    assert looped.compiler_options(platform="gpu") == CUBLAS | xla.STACKED_BY_COPY
    assert unrolled.compiler_options(platform="gpu") == CUBLAS
    monkeypatch.setenv("XLA_FLAGS", f"--{min(xla.STACKED_BY_COPY)}=true")
    assert looped.compiler_options(platform="gpu") == CUBLAS


def test_the_installed_jaxlib_knows_each_option(tmp_path):
    """It refuses a program compiled with one that it does not know."""
    kinds = {"writes_to_peers": True, "copies": True, "experts": True, "loops": True}
    options = xla.compiler_options("gpu", 2, True, **kinds, autotuned=tmp_path)
    for name, value in options.items():
        xla.check_flags(f"--{name}={value}")
    compiled = jax.jit(lambda x: x + 1).lower(jax.ShapeDtypeStruct((), "float32"))
    compiled.compile(compiler_options=options)
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_gpu_no_such_option"):
        compiled.compile(compiler_options={"xla_gpu_no_such_option": True})


def test_programs_are_counted_without_a_cache_too():
    xla.configure()
    argument, before = jax.device_put(1.0), xla.compilations()
    kept = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        program = jax.jit(lambda x: x * 17 + 4)
        program(argument), program(argument)
    finally:
        jax.config.update("jax_enable_compilation_cache", kept)
    compiled, found = (now - then for now, then in zip(xla.compilations(), before, strict=True))
    assert (compiled, found) == (1, 0)
