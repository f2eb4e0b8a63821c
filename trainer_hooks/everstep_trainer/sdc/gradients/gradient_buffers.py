"""Check that a rank sends the gradients that its backward pass has computed.

The digests of gradients when they arrive at their parameters equal those of the same gradients in the buffer that was
sent, taken after the exchange. A difference is the rank's own: nothing but memory and its own copies lies between both.
The smallest parameters, such as biases, are left out: each one costs nearly as much as a large one.

Where a gradient lies in its buffer is learnt from the audit before. Under ``fully_shard`` the buffer is not visible, so
the audit is off there.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch.utils.hooks import RemovableHandle

from everstep.vocabulary import AuditKind
from everstep_trainer.digests.digest import PlacedDigest, joined_digest, sum_of, to_hex
from everstep_trainer.sdc.audit import Audit, AuditSetup, current_backward_pass, is_strided
from everstep_trainer.sdc.gradients.gradient_exchange import MAX_BUCKETS, GradientReader, GradientTap

log = logging.getLogger(__name__)

MAX_EMPTY_AUDITS = 8
"""Audits in a row without a comparison after which versions count as audited without this one. A bucket is compared
only if all of its watched gradients were seen to arrive: not where one has no gradient in each step, for instance."""
LEFT_OUT_SHARE = 0.01
"""Largest part of a model's elements that may be in the parameters left out."""


class _Arrived(NamedTuple):
    """A gradient when it arrived, or when it was added to those of earlier micro-batches."""

    place: int
    """Elements of watched gradients before it in its bucket."""
    digest: torch.Tensor | int
    """As at that place of one flat tensor; see `PlacedDigest`."""
    backward_pass: int = -1
    """torch's number of the pass that brought it."""


class _Outgoing(NamedTuple):
    """Gradients that are sent together, in the bucket of this number."""

    bucket: int
    gradients: list[torch.Tensor]
    """The watched ones, where they are sent from."""
    arrived: list[_Arrived]


class _Sent(NamedTuple):
    """Digests of gradients that were sent together, and how many of them differ, in words."""

    bucket: int
    arrived: torch.Tensor
    sent: torch.Tensor
    difference: str


class GradientBuffers(Audit, GradientReader):
    """AuditKind.GRADIENT_BUFFER on one rank."""

    kind = AuditKind.GRADIENT_BUFFER

    def __init__(self, setup: AuditSetup, tap: GradientTap) -> None:
        super().__init__(setup)
        self._tap = tap
        self._is_on = tap.sees_sums and setup.world_size > 1
        replicated = [
            parameter for module in tap.replicas for parameter in module.parameters() if parameter.requires_grad
        ]
        self._watched = {id(parameter): parameter for parameter in _largest(replicated)} if self._is_on else {}
        self._digests: dict[int, PlacedDigest] = {}  # of watched gradients, by id of the parameter, at known places
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

    def gaps(self) -> Iterator[str]:
        if not self._is_on:
            yield "audit gradient_buffer is off: it needs run.replicate in exact mode"
        elif self.left_out:
            yield "audit gradient_buffer finds nothing to compare: not all gradients of a bucket arrive"

    def begin_step(self, step: int, *, due: bool) -> None:
        self.close()
        if not self._is_on or not due:
            return
        self._sent.clear()
        self._arrived.clear()
        self._outgoing, self._buckets, self._is_reading = None, 0, True
        self._tap.open(self)
        for known, digest in self._digests.items():
            self._watch(self._watched[known], digest)

    def _watch(self, parameter: torch.Tensor, digest: PlacedDigest) -> None:
        """Digest the parameter's gradient when it arrives, or when it was added to those of earlier micro-batches."""

        def arrives(gradient: torch.Tensor) -> None:
            is_final = parameter.grad is None and gradient.dtype == parameter.dtype and is_strided(gradient)
            if is_final and _is_last(parameter._backward_hooks, arrival) and _is_only(parameter, addition):
                with self.cost():
                    place = digest.offset
                    self._arrived[id(parameter)] = _Arrived(place, digest.of(gradient), current_backward_pass())

        def is_added(parameter: torch.Tensor) -> None:
            known, number = self._arrived.pop(id(parameter), None), current_backward_pass()
            if known is not None and known.backward_pass == number:
                self._arrived[id(parameter)] = known
            elif (
                parameter.grad is not None
                and is_strided(parameter.grad)
                and _is_last(parameter._post_accumulate_grad_hooks, addition)
            ):
                with self.cost():
                    self._arrived[id(parameter)] = _Arrived(digest.offset, digest.of(parameter.grad), number)

        # The program's hooks, of earlier steps or of this one, may change a gradient when it arrives or once it was
        # added. So it counts as arrived after all of them, and not at all if one of them follows.
        arrival = parameter.register_hook(arrives)  # type: ignore[no-untyped-call]
        addition = parameter.register_post_accumulate_grad_hook(is_added)  # type: ignore[no-untyped-call]
        self._hooks += arrival, addition

    def on_local(
        self,
        parameters: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
        sent: torch.Tensor,
        sizes: Sequence[int],
    ) -> None:
        with self.cost():
            outgoing = self._outgoing_of(parameters, gradients, sent)
            self._outgoing = outgoing if outgoing.arrived and len(self._sent) < MAX_BUCKETS else None
            self._buckets += 1

    def _outgoing_of(
        self, parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], flat: torch.Tensor
    ) -> _Outgoing:
        """Return the watched gradients of a bucket, none unless all are known. Learn the place of each one.

        Args:
            parameters: All of the bucket.
            gradients: Theirs.
            flat: The bytes that are sent.
        """
        begin, place, sent, arrived = 0, 0, list[torch.Tensor](), list[_Arrived]()
        for parameter, gradient in zip(parameters, gradients, strict=True):
            size = gradient.numel()
            if id(parameter) in self._watched:
                known = self._arrived.pop(id(parameter), None)
                offset = gradient.storage_offset() - gradients[0].storage_offset()
                if gradient.is_contiguous() and offset == begin:
                    if known is not None and known.place == place:
                        arrived.append(known)
                    else:
                        self._digests[id(parameter)] = PlacedDigest(parameter, place)
                else:
                    self._digests.pop(id(parameter), None)
                sent.append(flat[begin : begin + size])
                place += size
            begin += size
        return _Outgoing(self._buckets, sent, arrived if len(arrived) == len(sent) else [])

    def on_received(self, slices: torch.Tensor) -> None:
        """Take the digest of what was sent. ``slices``: what was received instead."""
        if self._outgoing is None:
            return
        with self.cost():
            outgoing, self._outgoing = self._outgoing, None
            arrived = sum_of([piece.digest for piece in outgoing.arrived])
            sent = joined_digest(outgoing.gradients)
            difference = "they changed before they were sent"
            if sent.device.type == "cpu" and bool(arrived != sent):
                difference = _describe(outgoing)
            self._sent.append(_Sent(outgoing.bucket, arrived, sent, difference))

    def before_update(self, step: int, *, due: bool) -> None:
        if not self._is_reading:
            return
        self.close()
        self._empty_audits = 0 if self._sent else self._empty_audits + 1
        if not self._sent:
            return
        differ = torch.stack([bucket.arrived != bucket.sent for bucket in self._sent]).tolist()
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


def _is_last(hooks: Mapping[int, object] | None, own: RemovableHandle) -> bool:
    """Return whether no hook of the program follows ``own``."""
    return bool(hooks) and next(reversed(list(hooks or ()))) == own.id


def _is_only(parameter: torch.Tensor, own: RemovableHandle) -> bool:
    """Return whether no hook of the program runs once the parameter's gradient was added."""
    return list(parameter._post_accumulate_grad_hooks or ()) == [own.id]


def _largest(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the parameters without the smallest ones, which together have few of the elements."""
    may_leave_out = LEFT_OUT_SHARE * sum(parameter.numel() for parameter in parameters)
    by_size = sorted(parameters, key=torch.numel)
    while by_size and by_size[0].numel() <= may_leave_out:
        may_leave_out -= by_size.pop(0).numel()
    return by_size


def _describe(outgoing: _Outgoing) -> str:
    """Return in words how many gradients have changed since they arrived."""
    changed = sum(
        PlacedDigest(gradient, piece.place).of(gradient) != piece.digest
        for piece, gradient in zip(outgoing.arrived, outgoing.gradients, strict=True)
    )
    return f"{changed} of {len(outgoing.arrived)} gradients changed after they had arrived"
