"""The Triton kernel of digests, run by Triton's interpreter on the host, and on a GPU."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest
import torch

from everstep_trainer.digests.digest import add_bytes, add_bytes_by_rows
from everstep_trainer.digests.digest_weights import ROW_BYTES

PLACES = [(0, 0), (4, 0), (0, 8), (2, 6), (0, ROW_BYTES - 4), (3, 3 * ROW_BYTES + 1), (0, 1 << 40)]
SIZES = [1, 13, 64 << 10, ROW_BYTES + 9]


def data() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 256, (2 * ROW_BYTES,), dtype=torch.uint8, generator=generator)


INTERPRETED = """
import json, sys, torch
from everstep_trainer.digests.digest_kernel import add_bytes
data = torch.frombuffer(bytearray(sys.stdin.buffer.read()), dtype=torch.uint8)
for size, shift, start in json.loads(sys.argv[1]):
    total = torch.ones((), dtype=torch.int64)
    add_bytes(total, data[shift : shift + size], start)
    print(total.item())
"""


def test_kernel_adds_the_same_sum() -> None:
    """Runs in a separate process, since Triton decides on the interpreter when it is first imported."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    cases = [(size, *place) for size in SIZES for place in PLACES]
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED, json.dumps(cases)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        input=data().numpy().tobytes(),
        capture_output=True,
        check=True,
    )
    for (size, shift, start), found in zip(cases, done.stdout.split(), strict=True):
        expected = torch.ones((), dtype=torch.int64)
        add_bytes_by_rows(expected, data()[shift : shift + size], start)
        assert int(found) == expected.item(), (size, shift, start)


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
