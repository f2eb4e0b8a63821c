"""Define what all audits of the chain share: what they may know of a run, when they are called, what they report."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import ClassVar

import msgspec
import torch
from torch import nn

from everstep.vocabulary import AuditKind, AuditRole
from everstep.wire.v1.local import WrongProduct
from everstep_trainer.sdc.cost_meter import CostMeter


class Mismatch(msgspec.Struct, frozen=True, kw_only=True):
    """This rank's own statement about work whose results differ; see `everstep.wire.v1.training.AuditStatement`."""

    audit: AuditKind
    step: int
    unit: str
    owner: int
    role: AuditRole
    original: str = ""
    digest: str = ""
    expects_arbiter: bool = False
    wrong_results: int = 1
    difference: str = ""

    @property
    def clears_owner(self) -> bool:
        """Whether this withdraws an earlier suspicion: the samples, and no GPU, made the gradients stand out."""
        return self.audit is AuditKind.GRADIENT_NORM and bool(self.original) and self.original == self.digest


class AuditSetup(msgspec.Struct, frozen=True, kw_only=True):
    """What an audit may know of its generation. ``nodes``: the node of each rank, by number."""

    rank: int
    world_size: int
    nodes: tuple[str, ...]
    device: torch.device
    objects: Mapping[str, object]
    """The tracked objects by name."""
    ddp_wrappers: tuple[nn.Module, ...] = ()
    """The wrappers of ``run.replicate``; a script may track the model inside instead."""
    has_replica_per_rank: bool
    """Every rank computes the whole model, on its own samples."""
    report: Callable[[Mismatch], None]
    keep_wrong_product: Callable[[WrongProduct], None] = lambda product: None
    """Called with a matrix product of this rank that is wrong: its node tries it again before it serves again."""

    @property
    def ranks_on_node(self) -> int:
        """Number of ranks on this rank's node; all of them if the nodes are unknown."""
        return self.nodes.count(self.nodes[self.rank]) if self.nodes else self.world_size

    def on_same_node(self, rank: int, other: int) -> bool:
        """Return whether both ranks are known to be on one node."""
        return bool(self.nodes) and self.nodes[rank] == self.nodes[other]


def current_backward_pass() -> int:
    """Return torch's number of the backward pass that this thread is in, or -1."""
    return int(torch._C._current_graph_task_id())


def is_in_backward() -> bool:
    """Return whether this thread is in a backward pass, where a forward pass is a recomputation."""
    return current_backward_pass() != -1


def is_strided(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has bits in one layout: no sparse gradient, for instance."""
    return tensor.layout is torch.strided


class Audit:
    """One audit of the chain on one rank in one generation. All ranks call the same methods in the same order.

    A subclass overrides what it needs. ``due``: an audit was planned for this step, on all ranks. In other steps an
    audit is called only if it is needed, as ``is_needed`` says. The methods run on the training thread, so their time
    counts as the audit's cost, and they may call collectives of the default group except in ``begin_step``. Work
    inside the forward or backward pass goes under ``with self.cost():``, and collectives under
    ``with self.waiting():`` inside of it: what a rank waits there for a slower one, it would else wait for it in
    training's next collective.
    """

    kind: ClassVar[AuditKind]

    def __init__(self, setup: AuditSetup) -> None:
        self.setup = setup
        self.meter = CostMeter(setup.device)
        self.previous_update = -1
        """The step with the update before the running one's; the chain sets it."""

    @property
    def rounds(self) -> int:
        """Due audits after which each part of this rank's work was checked once; 0: it promises no such thing."""
        return 0

    def compared_part(self, turn: int) -> int | None:
        """Return which of the ``rounds`` parts the due audit of this step has compared; None: it compared nothing.

        Args:
            turn: The part, if the audit checks all parts in turn.
        """
        return turn

    @property
    def left_out(self) -> Collection[int]:
        """Parts that cannot be audited in this generation, as the log has said."""
        return ()

    def checked_modules(self) -> Iterable[nn.Module]:
        """Return the modules whose work this audit checks, submodules included."""
        return ()

    def left_out_modules(self) -> Iterable[tuple[nn.Module, str]]:
        """Return modules that this audit would check, submodules included, each with the reason why it does not."""
        return ()

    def gaps(self) -> Iterable[str]:
        """Return what else this audit does not check, each a clause such as ``audit state is off: ...``."""
        return ()

    def is_needed(self, step: int) -> bool:
        """Return whether the audit is called in this step even if it is not due; the same on all ranks."""
        return False

    def begin_step(self, step: int, *, due: bool) -> None:
        """Prepare before the forward pass."""

    def before_update(self, step: int, *, due: bool) -> None:
        """Check after the backward pass, before the first optimizer changes parameters."""

    def after_update(self, step: int, *, due: bool) -> None:
        """Check after the step's last optimizer has changed parameters, before the snapshot of the state is taken."""

    def update_refused(self, step: int) -> None:
        """Check in place of ``before_update`` and ``after_update``: a loss was bad, and all ranks leave the update out.

        The guard has restored an earlier state before.
        """

    def close(self) -> None:
        """Remove all hooks."""

    def report_own(
        self,
        step: int,
        unit: str,
        *,
        original: str = "",
        digest: str = "",
        difference: str = "",
        arbiter: bool = False,
        wrong_results: int = 1,
    ) -> None:
        """State that this rank's own work of ``unit`` differs; see `Mismatch`. ``arbiter``: one will state it, too."""
        self.setup.report(
            Mismatch(
                audit=self.kind,
                step=step,
                unit=unit,
                owner=self.setup.rank,
                role=AuditRole.OWNER,
                original=original,
                digest=digest,
                expects_arbiter=arbiter,
                wrong_results=wrong_results,
                difference=difference,
            )
        )

    def cost(self) -> AbstractContextManager[None]:
        """Count the time of a ``with`` block as this audit's cost."""
        return self.meter.count(work=1.0)

    def waiting(self) -> AbstractContextManager[None]:
        """Count the time of a ``with`` block, inside one of ``cost``, as a wait for other ranks."""
        return self.meter.count(work=-1.0, wait=1.0)

    def prepaying(self) -> AbstractContextManager[None]:
        """Count the time of a ``with`` block once more, for equal work that a later step does."""
        return self.meter.count(work=1.0)

    def prepaid(self) -> AbstractContextManager[None]:
        """Count the time of a ``with`` block, inside one of ``cost``, not at all: an earlier step has paid."""
        return self.meter.count(work=-1.0)
