"""The bounded store of wrong matrix products that an agent keeps for its probes."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from everstep.clock import ManualClock
from everstep.wire.v1.local import WrongProduct
from everstep_agent.probes.wrong_products import KEPT_PRODUCTS, PAUSE_S, WrongProductStore


def product(work: str = "up", left: bytes = b"0000") -> WrongProduct:
    return WrongProduct(work=work, dtype="float32", rows=1, inner=1, columns=1, left=left, right=b"0000")


def test_newest_products_outlive_the_agent(tmp_path: Path) -> None:
    clock = ManualClock()
    store = WrongProductStore(tmp_path / "wrong-products", clock)
    for number in range(KEPT_PRODUCTS + 2):
        store.add(product(f"step {number}"))
        store.add(product("too soon"))
        clock.advance(PAUSE_S)
    assert [product.work for product in store.products] == [f"step {number}" for number in range(2, KEPT_PRODUCTS + 2)]
    assert WrongProductStore(tmp_path / "wrong-products", ManualClock()).products == store.products


def test_product_of_another_size_is_not_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = WrongProductStore(tmp_path / "wrong-products", ManualClock())
    store.add(product(left=b"00"))
    assert not store.products
    assert "up is not kept for probes" in caplog.text


@pytest.mark.parametrize("content", [b"", b"[{}]", b'["\xff"]', msgspec.json.encode([product(left=b"00")])])
def test_damaged_file_counts_as_empty(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "wrong-products").write_bytes(content)
    assert not WrongProductStore(tmp_path / "wrong-products", ManualClock()).products


def test_products_that_cannot_be_written_are_still_tried(tmp_path: Path) -> None:
    store = WrongProductStore(tmp_path / "missing" / "wrong-products", ManualClock())
    store.add(product())
    assert len(store.products) == 1
