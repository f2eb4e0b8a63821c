"""Small models that one rank trains with one audit, in this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from everstep.wire.v1.local import WrongProduct
from everstep_trainer.sdc.audit import Audit, AuditSetup, Mismatch


class Block(nn.Module):
    """Two layers with a residual, checkpointed."""

    def __init__(self, checkpointed: bool = True) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(16, 64), nn.ReLU(inplace=True), nn.Linear(64, 16)
        self.drop = nn.Dropout(0.1)
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self._inner, x, use_reentrant=False) if self.checkpointed else self._inner(x)

    def _inner(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.drop(self.down(self.act(self.up(x))))
        return result


def fresh(checkpointed: bool = True) -> nn.Sequential:
    """Return two blocks, the same on each call."""
    torch.manual_seed(0)
    return nn.Sequential(Block(checkpointed), Block(checkpointed))


AnyAudit = TypeVar("AnyAudit", bound=Audit)


def audit_of(
    kind: type[AnyAudit], model: nn.Module, keep_wrong_product: Callable[[WrongProduct], None] = lambda product: None
) -> tuple[AnyAudit, list[Mismatch]]:
    """Return an audit of a model, and the list of its future reports. ``keep_wrong_product``: see `AuditSetup`."""
    mismatches: list[Mismatch] = []
    setup = AuditSetup(
        rank=0,
        world_size=1,
        nodes=(),
        device=torch.device("cpu"),
        objects={"model": model},
        has_replica_per_rank=True,
        report=mismatches.append,
        keep_wrong_product=keep_wrong_product,
    )
    return kind(setup), mismatches


def train(model: nn.Module, audit: Audit | None, steps: int, micro_batches: int = 1, dtype: Any = None) -> torch.Tensor:
    """Train from the same data on each call; return all parameters. ``dtype``: of autocast."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        if audit is not None:
            audit.begin_step(step, due=True)
        for _ in range(micro_batches):
            with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
                loss = model(torch.randn(4, 8, 16)).float().square().mean()
            loss.backward()
        if audit is not None:
            audit.before_update(step, due=True)
        optimizer.step()
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])
