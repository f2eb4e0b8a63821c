"""The Triton kernel of digests, run by Triton's interpreter on the host, and on a GPU."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import pytest
import torch
from everstep_trainer.sdc.digest import add_bytes, add_bytes_by_rows, tensor_digest
from everstep_trainer.sdc.digest_weights import ROW_BYTES

NAME = "everstep_trainer.sdc.digest_kernel"
PLACES = [(0, 0), (4, 0), (0, 8), (2, 6), (0, ROW_BYTES - 4), (3, 3 * ROW_BYTES + 1), (0, 1 << 40)]
SIZES = [1, 13, 64 << 10, ROW_BYTES + 9]


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    pytest.importorskip("triton", reason="Triton is not installed")
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    return importlib.import_module(NAME)


def data() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 256, (2 * ROW_BYTES,), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("size", SIZES)
def test_kernel_adds_the_same_sum(interpreted: ModuleType, size: int) -> None:
    for shift, start in PLACES:
        expected, found = torch.ones((), dtype=torch.int64), torch.ones((), dtype=torch.int64)
        add_bytes_by_rows(expected, data()[shift : shift + size], start)
        interpreted.add_bytes(found, data()[shift : shift + size], start)
        assert found.equal(expected), (shift, start)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("size", SIZES)
def test_gpu_adds_the_same_sum(size: int) -> None:
    for shift, start in PLACES:
        expected, totals = torch.ones((), dtype=torch.int64), torch.ones(2, dtype=torch.int64, device="cuda")
        some = data()[shift : shift + size]
        on_gpu = data().cuda()[shift : shift + size]
        add_bytes(expected, some, start)
        add_bytes(totals[0], on_gpu, start)
        add_bytes_by_rows(totals[1], on_gpu, start)
        assert totals.tolist() == [expected.item()] * 2, (shift, start)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_gpu_digests_of_ranges_add_up() -> None:
    whole = torch.randn(3_000_001, device="cuda", dtype=torch.bfloat16)
    parts = [tensor_digest(whole[:1001]), tensor_digest(whole[1001:], offset=1001)]
    assert sum(parts).equal(tensor_digest(whole))
