"""Archives written without torch, read by the torch that is installed, and by zip tools."""

from __future__ import annotations

import io
import math
import zipfile
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

from everstep.errors import ConfigurationError, MalformedMessage
from everstep_agent.spill.torch_format import (
    Global,
    PickledCall,
    RawTensor,
    TensorArchive,
    dumps,
    object_archive,
)

TYPED = ["float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"]
COMPLEX = ["complex64", "complex128"]
UNTYPED = ["uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"]
DTYPES = [*TYPED, *COMPLEX, *UNTYPED, "float8_e8m0fnu"]


def values_of(dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    kind = getattr(torch, dtype)
    raw = torch.arange(math.prod(shape) * kind.itemsize, dtype=torch.int64).remainder(2 if dtype == "bool" else 60)
    return raw.to(torch.uint8).view(kind).reshape(shape) if raw.numel() else torch.empty(shape, dtype=kind)


def raw_bytes(tensor: torch.Tensor) -> bytes:
    flat = tensor.contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def archived(tensor: torch.Tensor) -> bytes:
    archive = TensorArchive(str(tensor.dtype).removeprefix("torch."), tensor.dtype.itemsize, tuple(tensor.shape))
    data = raw_bytes(tensor)
    whole = archive.head + data + archive.tail(zlib.crc32(data))
    assert len(whole) == archive.length
    return whole


def records_of(archive: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(archive)) as file:
        assert file.testzip() is None
        return {name: file.read(name) for name in file.namelist()}


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1,), (5,), (3, 4), (2, 1, 3)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_loads_an_archive_written_without_torch(dtype: str, shape: tuple[int, ...]) -> None:
    tensor = values_of(dtype, shape)
    read = torch.load(io.BytesIO(archived(tensor)), weights_only=True)
    assert (read.dtype, read.shape, read.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
    assert raw_bytes(read) == raw_bytes(tensor)


@pytest.mark.parametrize("dtype", DTYPES)
def test_records_are_those_of_torch_save(dtype: str) -> None:
    tensor, file = values_of(dtype, (3, 4)), io.BytesIO()
    torch.save(tensor, file)
    theirs, ours = records_of(file.getvalue()), records_of(archived(tensor))
    assert list(ours) == list(theirs)
    same = set(theirs) - {"archive/data.pkl", "archive/.data/serialization_id"}
    assert {name: ours[name] for name in same} == {name: theirs[name] for name in same}


@pytest.mark.parametrize("nbytes", [(1 << 32) - 2, (1 << 32) - 1, (1 << 32) + 64])
def test_tensors_beyond_four_gibibytes_are_read(tmp_path: Path, nbytes: int) -> None:
    archive = TensorArchive("uint8", 1, (nbytes,))
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.write(archive.head)
        file.seek(nbytes - 1, io.SEEK_CUR)  # a hole: the file takes no room
        file.write(b"\x07")
        file.write(archive.tail(0))
    assert path.stat().st_size == archive.length
    tensor = torch.load(path, weights_only=True, mmap=True)
    assert tensor.shape == (nbytes,)
    assert tensor[-3:].tolist() == [0, 0, 7]
    with zipfile.ZipFile(path) as file_:
        assert file_.getinfo("archive/data/0").file_size == nbytes


PLAIN: list[Any] = [
    None,
    True,
    0,
    255,
    256,
    65_536,
    -1,
    1 << 40,
    -(1 << 70),
    0.1,
    float("inf"),
    1 + 2j,
    "lr",
    "ü\ud800",
    b"\x00\xff",
    (),
    (1,),
    (1, 2),
    (1, 2, 3),
    (1, 2, 3, 4),
    [],
    [1, "a"],
    {},
    {"a": {1: (2,)}},
    {1, 2, 3},
]


@pytest.mark.parametrize("value", PLAIN, ids=repr)
def test_plain_values_load_with_both_torch_readers(value: Any) -> None:
    archive = object_archive(value)
    for weights_only in (True, False):
        read = torch.load(io.BytesIO(archive), weights_only=weights_only)
        assert read == value
        assert type(read) is type(value)


def test_tensors_inside_a_value_are_tensors_again() -> None:
    value = {"a": [RawTensor("bfloat16", (2,), raw_bytes(torch.ones(2, dtype=torch.bfloat16)))], "n": 3}
    value["b"] = (RawTensor("uint16", (), b"\x05\x00"),)
    read = torch.load(io.BytesIO(object_archive(value)), weights_only=True)
    assert read["a"][0].tolist() == [1.0, 1.0]
    assert read["b"][0].dtype is torch.uint16
    assert (read["b"][0].item(), read["n"]) == (5, 3)


def test_non_plain_value_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="Path cannot be written"):
        dumps(Path("x"))
    with pytest.raises(ConfigurationError, match="is not a valid name"):
        dumps(PickledCall(Global("os\nsystem", "x")))
    with pytest.raises(MalformedMessage, match="not the name of a dtype"):
        TensorArchive("float32\nos", 4, (1,))
