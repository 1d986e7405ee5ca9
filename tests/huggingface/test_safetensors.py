"""Files against the library's, and headers that nobody should have written."""

import json

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxthru.huggingface.safetensors import DTYPES, Reader, TensorInfo, header_of, ordered, write
from jaxthru.runtime.errors import InputError

BYTES = {name: (np.arange(2 * 3 * dtype.itemsize) % 2).astype(np.uint8) for name, dtype in DTYPES.items()}


def tensors() -> dict[str, np.ndarray]:
    """One of each dtype, and names and shapes that are out of the ordinary."""
    found = {f"of {name}": BYTES[name].view(dtype).reshape(2, 3) for name, dtype in DTYPES.items()}
    found |= {
        'ü\n"\\\x7f\x01': np.float32([[1.5]]),
        "": np.array(2, np.float32),
        "none": np.zeros((0, 4), np.int8),
    }
    return found | {
        "bf16": np.arange(5).astype(ml_dtypes.bfloat16),
        "b": np.float16([1]),
        "a": np.float16([2]),
    }


def by_library(path, arrays, metadata=None):
    """The library's own writer, which takes pointers; its numpy one knows no bfloat16."""
    specs = {
        name: safetensors.TensorSpec(
            dtype=array.dtype.name, shape=array.shape, data_ptr=array.ctypes.data, data_len=array.nbytes
        )
        for name, array in arrays.items()
    }
    path.write_bytes(bytes(safetensors.serialize(specs, metadata=metadata)))
    return path


def rewritten(path, reader):
    write(path, reader.tensors, lambda names: map(reader.array, names), reader.metadata)
    return path


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}, {"format": "ü\n"}])
def test_a_file_of_the_library_is_read_and_written_again_to_the_byte(tmp_path, metadata):
    source = by_library(tmp_path / "a.safetensors", tensors(), metadata)
    reader = Reader(source)
    assert reader.metadata == metadata and reader.tensors.keys() == tensors().keys()
    for name, array in tensors().items():
        found = reader.array(name)
        assert found.dtype == array.dtype and found.shape == array.shape and not found.flags.writeable
        assert found.tobytes() == array.tobytes() == reader.bytes(name).tobytes()
        assert np.shares_memory(found, reader._bytes) or not array.size
    assert rewritten(tmp_path / "b.safetensors", reader).read_bytes() == source.read_bytes()


def test_the_library_reads_what_is_written_of_arrays_with_strides(tmp_path):
    whole = np.arange(24, dtype=np.float32).reshape(4, 6)
    arrays = {"transposed": whole.T, "reversed": whole[::-1, ::2], "column": whole[:, 1], "plain": whole}
    arrays["fortran"] = np.asfortranarray(whole)
    infos = {name: TensorInfo("F32", array.shape) for name, array in arrays.items()}
    write(tmp_path / "a.safetensors", infos, lambda names: (arrays[name] for name in names))
    found = safetensors.numpy.load_file(tmp_path / "a.safetensors")
    assert all((found[name] == array).all() for name, array in arrays.items()) and len(found) == len(arrays)


def test_arrays_are_asked_for_one_by_one_in_the_order_of_the_file(tmp_path):
    infos = {"x": TensorInfo("BF16", (4,)), "b": TensorInfo("F32", (2,)), "a": TensorInfo("BF16", (1,))}
    asked = []

    def arrays(names):
        for name in names:
            size = (tmp_path / "a").stat().st_size
            asked.append((name, size))
            yield np.zeros(infos[name].shape, DTYPES[infos[name].dtype])

    write(tmp_path / "a", infos, arrays)
    start = len(header_of(infos))
    assert asked == [("b", start), ("a", start + 8), ("x", start + 10)] and ordered(infos) == ["b", "a", "x"]
    with pytest.raises(ValueError, match=r"a: BF16 \[1\] was to be written, not float32 \[1\]"):
        write(tmp_path / "b", {"a": infos["a"]}, lambda names: [np.zeros(1, np.float32)])


def planted(path, header, rest=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + rest)
    return path


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


WRONG = {
    "twice": (b'{"a":{},"a":{}}', "names 'a' twice"),
    "twice_within": (b'{"a":{"dtype":"F32","dtype":"F32"}}', "names 'dtype' twice"),
    "list": (b"[]", "must begin with '{'"),
    "spaces": (b" {}", "must begin with '{'"),
    "unicode": (b'{"\xff":1}', "is no JSON in UTF-8"),
    "half": (b'{"a":', "is no JSON in UTF-8"),
    "deep": (b'{"a":' + b"[" * 100_000, "is no JSON in UTF-8"),
    "long": (b'{"a":' + b"1" * 10_000 + b"}", "is no JSON in UTF-8"),
    "metadata": ({"__metadata__": {"a": 1}}, "__metadata__ must be texts by name"),
    "other_metadata": ({"__metadata__": 1}, "__metadata__ must be texts by name"),
    "no_entry": ({"a": 1}, "tensor 'a': must have dtype, shape and data_offsets"),
    "key": ({"a": entry() | {"scale": 1}}, "tensor 'a': must have dtype, shape and data_offsets"),
    "dtype": ({"a": entry("F4")}, "tensor 'a': dtype 'F4' is not known; known are BOOL"),
    "no_dtype": ({"a": entry([])}, r"tensor 'a': dtype \[\] is not known"),
    "negative": ({"a": entry(shape=[-2])}, r"shape \[-2\] must be up to 32 whole numbers"),
    "truth": ({"a": entry(shape=[True, 2])}, "must be up to 32 whole numbers"),
    "dims": ({"a": entry(shape=[1] * 40 + [2])}, "must be up to 32 whole numbers"),
    "real": ({"a": entry(shape=[2.0])}, "must be up to 32 whole numbers"),
    "offsets": ({"a": entry(offsets=[0])}, "must be two whole numbers"),
    "backwards": ({"a": entry(offsets=[8, 0])}, "takes 8 bytes, its data_offsets .* span -8"),
    "span": ({"a": entry(offsets=[0, 4])}, r"F32 \[2\] takes 8 bytes, its data_offsets \[0, 4\] span 4"),
    "hole": ({"a": entry(offsets=[4, 12])}, "leave a hole: 0 is next"),
    "overlap": ({"a": entry(), "b": entry(offsets=[4, 12])}, r"tensor 'b': .* overlap: 8 is next"),
    "more": ({}, "tensors take 0 bytes, after the header the file has 8"),
    "less": (
        {"a": entry(shape=[4], offsets=[0, 16])},
        "tensors take 16 bytes, after the header the file has 8",
    ),
    "vast": ({"a": entry(shape=[2**40, 2**40, 0], offsets=[0, 0])}, "is too large"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_header_is_one_line(tmp_path, case):
    header, said = WRONG[case]
    with pytest.raises(InputError, match=said) as raised:
        Reader(planted(tmp_path / "a.safetensors", header, bytes(8)))
    assert "\n" not in str(raised.value) and "a.safetensors" in str(raised.value)


@pytest.mark.parametrize(
    "content, said",
    [
        (b"", "is no safetensors file: has 0 bytes"),
        (b"1234567", "is no safetensors file: has 7 bytes"),
        ((10).to_bytes(8, "little") + b"{}", "header of 10 bytes: the file has only 2"),
        ((10**9).to_bytes(8, "little") + b"{}", "header of 1000000000 bytes: may have 100000000"),
        (b"\xff" * 8, "may have 100000000"),
    ],
)
def test_a_wrong_length_is_one_line(tmp_path, content, said):
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(InputError, match=said):
        Reader(tmp_path / "a")


def test_what_cannot_be_opened_is_one_line(tmp_path):
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(InputError, match="cannot be read"):
            Reader(path)


VALID = {
    "__metadata__": {"format": "pt"},
    "a": entry(),
    "b": entry("BF16", [2, 2], [8, 16]),
    "c": entry("U8", [0], [16, 16]),
}
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=3), st.just("F32")
)
TREES = st.recursive(
    SCALARS,
    lambda child: st.lists(child, max_size=3) | st.dictionaries(st.text(max_size=3), child, max_size=3),
)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_headers_that_are_mutated_are_read_or_refused(tmp_path_factory, data):
    """Nothing but InputError is ever raised, and what is accepted can be looked at."""
    path = tmp_path_factory.getbasetemp() / "fuzzed.safetensors"
    if data.draw(st.booleans()):
        header = json.loads(json.dumps(VALID))
        name = data.draw(st.sampled_from(["a", "b", "c", "__metadata__"]))
        if data.draw(st.booleans()) and name != "__metadata__":
            header[name][data.draw(st.sampled_from(["dtype", "shape", "data_offsets"]))] = data.draw(TREES)
        else:
            header[name] = data.draw(TREES)
        planted(path, header, bytes(16))
    else:
        content = bytearray(planted(path, VALID, bytes(16)).read_bytes())
        for _ in range(data.draw(st.integers(1, 4))):
            content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
        path.write_bytes(
            content[: data.draw(st.integers(0, len(content)))] if data.draw(st.booleans()) else content
        )
    try:
        reader = Reader(path)
    except InputError:
        return
    assert all(reader.array(name).nbytes == info.nbytes for name, info in reader.tensors.items())
