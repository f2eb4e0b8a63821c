"""Check that a rank sends the gradients that its backward pass has computed.

The digests of gradients when they arrive at their parameters add up to the digest of the buffer that was sent, taken
after the exchange. A difference is the rank's own: nothing but memory and the rank's own copies lies between both.

Where a gradient lies in its buffer is learnt from the audit before. Under ``fully_shard`` the buffer is not visible, so
the link is off there.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch.utils.hooks import RemovableHandle

from everstep.vocabulary import AuditLink
from everstep_trainer.sdc.audit import Audit, AuditSetup
from everstep_trainer.sdc.digests.digest import tensor_digest, to_hex
from everstep_trainer.sdc.gradients.gradient_exchange import MAX_BUCKETS, GradientReader, GradientTap

log = logging.getLogger(__name__)

MAX_EMPTY_AUDITS = 8
"""Audits in a row without a comparison after which versions count as audited without the link. A bucket is compared
only if all of its gradients were seen to arrive: not where a parameter is left out in each step, for instance."""


class _Arrived(NamedTuple):
    """A gradient when it arrived, or when it was added to those of earlier micro-batches."""

    place: int
    """Of its first element in its bucket."""
    digest: torch.Tensor


class _Outgoing(NamedTuple):
    """Gradients that are sent together, in the bucket of this number."""

    bucket: int
    flat: torch.Tensor
    sizes: list[int]
    """Elements of each gradient."""
    arrived: list[torch.Tensor]
    """Their digests when they arrived."""


class _Sent(NamedTuple):
    """Digests of gradients that were sent together, and how many of them differ, in words."""

    bucket: int
    arrived: torch.Tensor
    sent: torch.Tensor
    difference: str


class GradientBuffers(Audit, GradientReader):
    """AuditLink.GRADIENT_BUFFER on one rank."""

    link = AuditLink.GRADIENT_BUFFER

    def __init__(self, setup: AuditSetup, tap: GradientTap) -> None:
        super().__init__(setup)
        self._tap = tap
        self._is_on = tap.sees_sums and setup.world_size > 1
        if not self._is_on and setup.rank == 0:
            log.info("gradients are not compared with what is sent: this needs run.replicate")
        self._places: dict[int, int] = {}  # of parameters in their buckets, by id, as in the last audit
        self._arrived: dict[int, _Arrived] = {}  # by the parameter's id
        self._hooks: list[RemovableHandle] = []
        self._outgoing: _Outgoing | None = None
        self._buckets = 0  # of this step, so far
        self._sent: list[_Sent] = []
        self._is_reading = False
        self._empty_audits = 0  # in a row

    @property
    def rounds(self) -> int:
        return 1 if self._is_on else 0

    def compared_part(self, turn: int) -> int | None:
        return turn if not self._empty_audits else None

    @property
    def left_out(self) -> Collection[int]:
        return range(self._empty_audits >= MAX_EMPTY_AUDITS)

    def begin_step(self, step: int, *, due: bool) -> None:
        self.close()
        if not self._is_on or not due:
            return
        self._sent.clear()
        self._arrived.clear()
        self._outgoing, self._buckets, self._is_reading = None, 0, True
        self._tap.open(self)
        for parameter in (one for module in self._tap.replicas for one in module.parameters()):
            if id(parameter) in self._places:
                self._watch(parameter, self._places[id(parameter)])

    def _watch(self, parameter: torch.Tensor, place: int) -> None:
        """Digest the parameter's gradient when it arrives, or when it was added to those of earlier micro-batches."""

        def arrives(gradient: torch.Tensor) -> None:
            with self.cost():
                if parameter.grad is None and gradient.dtype == parameter.dtype:
                    self._arrived[id(parameter)] = _Arrived(place, tensor_digest(gradient, offset=place))
                else:
                    self._arrived.pop(id(parameter), None)

        def is_added(parameter: torch.Tensor) -> None:
            if id(parameter) not in self._arrived and parameter.grad is not None:
                with self.cost():
                    self._arrived[id(parameter)] = _Arrived(place, tensor_digest(parameter.grad, offset=place))

        # The program's own hooks may change a gradient once it was added, so it counts as arrived after them.
        if not parameter._post_accumulate_grad_hooks:
            self._hooks.append(parameter.register_hook(arrives))  # type: ignore[no-untyped-call]
        self._hooks.append(parameter.register_post_accumulate_grad_hook(is_added))  # type: ignore[no-untyped-call]

    def on_local(
        self, parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], slices: torch.Tensor
    ) -> None:
        with self.cost():
            arrived = self._arrivals(parameters, gradients)
            self._outgoing = None
            if arrived and len(self._sent) < MAX_BUCKETS:
                sizes = [one.numel() for one in gradients]
                self._outgoing = _Outgoing(self._buckets, slices.view(-1), sizes, arrived)
            self._buckets += 1

    def _arrivals(self, parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the digests of gradients when they arrived; none unless all are known. Learn where each one lies."""
        place, arrived = 0, []
        for parameter, gradient in zip(parameters, gradients, strict=True):
            known = self._arrived.pop(id(parameter), None)
            is_there = gradient.is_contiguous() and gradient.storage_offset() - gradients[0].storage_offset() == place
            if is_there:
                self._places[id(parameter)] = place
            else:
                self._places.pop(id(parameter), None)
            if known is not None and is_there and known.place == place:
                arrived.append(known.digest)
            place += gradient.numel()
        return arrived if len(arrived) == len(parameters) else []

    def on_received(self, slices: torch.Tensor) -> None:
        """Take the digest of what was sent. ``slices``: what was received instead."""
        if self._outgoing is None:
            return
        with self.cost():
            outgoing, self._outgoing = self._outgoing, None
            arrived, sent = torch.stack(outgoing.arrived).sum(), tensor_digest(outgoing.flat)
            difference = "they changed before they were sent"
            if outgoing.flat.device.type == "cpu" and bool(arrived != sent):
                difference = _describe(outgoing)
            self._sent.append(_Sent(outgoing.bucket, arrived, sent, difference))

    def before_update(self, step: int, *, due: bool) -> None:
        if not self._is_reading:
            return
        self.close()
        self._empty_audits = 0 if self._sent else self._empty_audits + 1
        if not self._sent:
            if self._empty_audits == MAX_EMPTY_AUDITS and self.setup.rank == 0:
                log.info("audit gradient_buffer does not cover this model: not all gradients of a bucket arrive")
            return
        differ = torch.stack([one.arrived != one.sent for one in self._sent]).tolist()
        if True not in differ:
            return
        found = self._sent[differ.index(True)]
        self.report_own(
            step,
            "gradients before the exchange",
            original=to_hex(found.sent),
            digest=to_hex(found.arrived),
            difference=f"{found.difference} (bucket {found.bucket})",
        )

    def close(self) -> None:
        self._is_reading = False
        self._tap.close(self)
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


def _describe(outgoing: _Outgoing) -> str:
    """Return in words how many gradients have changed since they arrived."""
    place, changed = 0, 0
    for size, arrived in zip(outgoing.sizes, outgoing.arrived, strict=True):
        changed += bool(tensor_digest(outgoing.flat[place : place + size], offset=place) != arrived)
        place += size
    return f"{changed} of {len(outgoing.sizes)} gradients changed after they had arrived"
