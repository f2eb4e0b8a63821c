"""Checks of a single node by probes: right results pass, and wrong ones are reported with their position."""

from __future__ import annotations

import asyncio
import math
from typing import Literal, TypeAlias

import pytest
import torch

from everstep.vocabulary import ProbeKind
from everstep.wire.v1.directives import RunProbe
from everstep.wire.v1.local import WrongProduct
from everstep_agent.probes import child as checks
from everstep_agent.probes.probe_messages import ProbeRequest
from everstep_agent.probes.prober import Prober

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
Dtype: TypeAlias = Literal["float64", "float32", "bfloat16", "float16"]


def _silent(_what: str) -> None:
    pass


def _probe(kind: ProbeKind) -> RunProbe:
    return RunProbe(probe="probe-1", nodes=("n1",), store="127.0.0.1:0", repeats=2, timeout_s=60.0, kind=kind)


@pytest.mark.promise("probation")
def test_known_product_does_not_depend_on_summation_order() -> None:
    left, right, known = checks.known_product(512, CPU)
    assert torch.equal((left.long() @ right.long()).float(), known)
    assert torch.equal(left @ right, known)
    halves = left[:, :256] @ right[:256] + left[:, 256:] @ right[256:]
    assert torch.equal(halves, known)
    assert known.abs().max() < 2**24


def test_wrong_element_is_reported_with_its_place() -> None:
    _, _, known = checks.known_product(512, CPU)
    found = known.clone()
    found[3, 7] += 1.0
    with pytest.raises(checks.WrongResult, match=r"wrong in 1 of 262144 places, first at \[3, 7\]"):
        checks._compare(found, known, "product 1 of 2 on cpu")


def test_memory_word_losing_its_pattern_is_reported() -> None:
    chunk = torch.full((64,), -1, dtype=torch.int64)
    checks._check_words(chunk, -1, CPU, "ones")
    chunk[5] = 0
    with pytest.raises(checks.WrongResult, match="1 words of cpu's memory do not hold ones"):
        checks._check_words(chunk, -1, CPU, "ones")


def test_probe_process_runs_the_requested_kind() -> None:
    async def act() -> None:
        prober = Prober()
        try:
            computed = await prober.run(_probe(ProbeKind.COMPUTE), "n1", [_product()])
            remembered = await prober.run(_probe(ProbeKind.MEMORY), "n1")
        finally:
            await prober.close()
        assert computed.ok, computed.detail
        assert remembered.ok, remembered.detail
        assert not computed.wrong_result
        assert remembered.rows
        assert all(rate > 0 for _, _, rate in remembered.rows)

    asyncio.run(act())


def test_wrong_result_is_distinct_from_a_failed_probe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from everstep_agent.probes import child

    def wrong(_probe: RunProbe, _doing: checks.SetStage) -> checks.ProbeRows:
        raise checks.WrongResult("one place")

    def full(_probe: RunProbe, _doing: checks.SetStage) -> checks.ProbeRows:
        raise RuntimeError("CUDA out of memory")

    ask = ProbeRequest(probe=_probe(ProbeKind.COMPUTE), node="n1", deadline=0.0)
    monkeypatch.setattr(child, "check_matmul", wrong)
    assert child.run_probe(ask, _silent).wrong_result
    monkeypatch.setattr(child, "check_matmul", full)
    answer = child.run_probe(ask, _silent)
    assert (answer.ok, answer.wrong_result) == (False, False)


DTYPES: tuple[Dtype, ...] = ("float64", "float32", "bfloat16", "float16")


def _product(dtype: Dtype = "float32", rows: int = 4, inner: int = 2048, columns: int = 1) -> WrongProduct:
    generator = torch.Generator().manual_seed(3)
    left, right = (
        torch.randn(shape, generator=generator).to(getattr(torch, dtype)).view(torch.uint8).numpy().tobytes()
        for shape in ((rows, inner), (inner, columns))
    )
    return WrongProduct(
        work="up forward of step 7", dtype=dtype, rows=rows, inner=inner, columns=columns, left=left, right=right
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_product_that_is_wrong_again_fails_the_compute_probe(dtype: Dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    def multiply(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        product = left @ right
        product[5, 7] += 0.25 * product.abs().max()
        return product

    ask = ProbeRequest(probe=_probe(ProbeKind.COMPUTE), node="n1", deadline=math.inf, products=(_product(dtype),))
    assert checks.run_probe(ask, _silent).ok
    monkeypatch.setattr(checks, "_multiply", multiply)
    answer = checks.run_probe(ask, _silent)
    assert answer.wrong_result
    assert "up forward of step 7, which training got wrong on this node, is wrong again in 1 of" in answer.detail


@pytest.mark.parametrize(
    ("dtype", "left", "right"),
    [
        ("float16", [6e4, 6e4], [6e4, 6e4]),
        ("float32", [2e19, 2e19], [3e19, -3e19]),
        ("bfloat16", [2e19, 2e19], [3e19, -3e19]),
        ("bfloat16", [1e-39, 1e-39], [1e38, 1e38]),
    ],
)
def test_overflow_and_tiny_operands_blame_no_device(dtype: Dtype, left: list[float], right: list[float]) -> None:
    first, second = (
        torch.tensor(values, dtype=getattr(torch, dtype)).view(torch.uint8).numpy().tobytes()
        for values in (left, right)
    )
    product = WrongProduct(work="up", dtype=dtype, rows=1, inner=2, columns=1, left=first, right=second)
    checks.retry_wrong_product(product, CPU, _silent)


@pytest.mark.gpu
def test_every_gpu_passes_the_compute_and_memory_probes() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    count = torch.cuda.device_count()
    assert len(checks.check_matmul(_probe(ProbeKind.COMPUTE), _silent)) == count
    rows = checks.check_memory(_probe(ProbeKind.MEMORY), _silent)
    assert len(rows) == count
    assert all(rate > 0 for _, _, rate in rows)
