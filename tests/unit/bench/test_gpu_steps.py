"""The rows that the steps of bench.gpu derive from their measurements, without a GPU."""

from __future__ import annotations

import pytest
import torch

from bench.gpu_steps import digest
from everstep_trainer.digests.digest import WeightedDigest


def test_differing_digest_on_device_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(WeightedDigest):
        made = 0

        def value(self) -> int:
            Wrong.made += 1
            return Wrong.made

    tensors = [torch.ones(64, dtype=torch.bfloat16)]
    digest.require_equal(tensors)
    monkeypatch.setattr(digest, "WeightedDigest", Wrong)
    with pytest.raises(AssertionError, match="on the host"):
        digest.require_equal(tensors)
