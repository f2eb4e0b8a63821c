"""Check that gradients are added and distributed correctly by the collective between ranks.

Four checks, each for another place where bytes or sums may go wrong:

* Sending: the buffer that was sent has the same digest before and after the exchange. A difference is the rank's own,
  and accuses no receiver. `gradient_buffers` checks what happened to it before.
* Transport: the digest of each slice at the sender equals its digest at the receiver. A rank that differs from two
  others is convicted by them. A difference between two ranks alone accuses both.
* Sum: a weighted sum over a rank's slice equals the total of the weighted sums of what it received, up to rounding.
  Random weights make sure that no pattern of errors cancels out. A difference is the rank's own.
* Result: all replicas hold equal gradients before the update. A strict majority names the rank that differs.

Under ``fully_shard`` nothing of this is visible, and no two ranks hold equal gradients, so the audit is off there.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

import torch

from everstep.vocabulary import AuditKind, AuditRole
from everstep_trainer.digests.digest import combined_digest, float_hex, tensor_digest, to_hex
from everstep_trainer.parallel.lane import all_gather
from everstep_trainer.sdc.audit import Audit, AuditSetup, Mismatch, is_strided
from everstep_trainer.sdc.gradients.gradient_exchange import MAX_BUCKETS, GradientReader, GradientTap
from everstep_trainer.sdc.witnesses import choose_arbiter
from everstep_trainer.state.tensors import list_names

log = logging.getLogger(__name__)

COLUMNS = 64
"""Elements that are added up at once, in float32: few, so that this rounds little."""
BLOCKS = 4096
"""Such sums of which each is weighted otherwise."""
DOT_ROUNDINGS = COLUMNS // 4
"""Most additions one after the other in a sum of COLUMNS: kernels add in four lanes or more."""
ROUNDING_SIGMAS = 8.0
"""Standard deviations of rounding that a sum may be off. Each addition of an element rounds by at most eps / sqrt(12)
of its result in the mean, and no partial sum is larger than the addends and the total together."""
MAX_NAMED = 3
"""Most parameters named in a warning."""
AS_SENT, NOT_AS_SENT = "0" * 16, "f" * 16
"""What a rank and those at the other ends of its slices state in place of digests: each pair has other slices."""


@dataclass(frozen=True)
class _Exchanged:
    """Digests of gradients that were exchanged together.

    Attributes:
        before: Of all, before the exchange.
        sent: Of the slice for each rank, after the exchange.
        received: Of the slice that came from each rank.
    """

    before: torch.Tensor
    sent: torch.Tensor
    received: torch.Tensor


class Collectives(Audit, GradientReader):
    """AuditKind.COLLECTIVE on one rank."""

    kind = AuditKind.COLLECTIVE

    def __init__(self, setup: AuditSetup, tap: GradientTap) -> None:
        super().__init__(setup)
        self._tap = tap
        self._is_on = setup.has_replica_per_rank and setup.world_size > 1 and bool(tap.replicas)
        self._outgoing: tuple[Sequence[torch.Tensor], torch.Tensor] | None = None  # the slices, and their digest before
        self._exchanged: list[_Exchanged] = []
        self._sums: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []  # got, expected, tolerance
        self._parts = torch.zeros(2, dtype=torch.float64)
        self._is_reading = False
        self._seen: set[int] = set()  # ids of parameters whose gradients were exchanged in this step

    @property
    def rounds(self) -> int:
        return 1 if self._is_on else 0

    def gaps(self) -> Iterator[str]:
        if not self._is_on:
            yield "audit collective is off: it needs DistributedDataParallel"

    def begin_step(self, step: int, *, due: bool) -> None:
        if self._is_on and due:
            self._outgoing = None
            self._exchanged.clear()
            self._sums.clear()
            self._seen.clear()
            self._is_reading = True
            self._tap.open(self)

    def on_local(
        self,
        parameters: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
        sent: torch.Tensor,
        sizes: Sequence[int],
    ) -> None:
        self._seen |= {id(parameter) for parameter in parameters}
        if self._tap.sees_sums and len(self._sums) < MAX_BUCKETS:
            with self.cost():
                self._outgoing = torch.split(sent, list(sizes)), tensor_digest(sent)

    def on_received(self, slices: torch.Tensor) -> None:
        if len(self._sums) == MAX_BUCKETS:
            return
        with self.cost():
            if self._outgoing is not None:
                sent, before = self._outgoing
                self._outgoing = None
                place = sum(map(len, sent[: self.setup.rank]))
                received = torch.stack([tensor_digest(row, offset=place) for row in slices])
                self._exchanged.append(_Exchanged(before, row_digests(sent), received))
            self._parts = weighted_sums(slices)

    def on_sum(self, total: torch.Tensor) -> None:
        if len(self._sums) == MAX_BUCKETS:
            return
        with self.cost():
            got, squares_of_total = weighted_sums(total[None])[0]
            squares = squares_of_total + self._parts[:, 1].sum()
            wide = torch.promote_types(total.dtype, torch.float32)
            roundings = (len(self._parts) - 1) * torch.finfo(total.dtype).eps ** 2
            roundings += DOT_ROUNDINGS * torch.finfo(wide).eps ** 2
            self._sums.append((got, self._parts[:, 0].sum(), ROUNDING_SIGMAS * (roundings * squares / 12).sqrt()))

    def before_update(self, step: int, *, due: bool) -> None:
        if not self._is_reading:
            return
        self._is_reading = False
        self.close()
        self._check_sums(step)
        self._check_between_ranks(step)

    def close(self) -> None:
        self._tap.close(self)

    def _check_sums(self, step: int) -> None:
        for bucket, (got, expected, tolerance) in enumerate(self._sums):
            error = abs(float(got) - float(expected))
            if error <= float(tolerance) or not torch.isfinite(expected):  # infinite gradients are the model's
                continue
            self.report_own(
                step,
                f"sum of bucket {bucket}",
                original=float_hex(got),
                digest=float_hex(expected),
                difference=f"the sum is off by {error:.3g}, rounding explains {float(tolerance):.3g}",
            )

    def _check_between_ranks(self, step: int) -> None:
        """Compare gradients at senders and receivers, and those that the ranks are about to use."""
        setup, world, number = self.setup, self.setup.world_size, len(self._exchanged)
        gradients = [p.grad for p in self._exchanged_parameters() if p.grad is not None and is_strided(p.grad)]
        mine = torch.zeros(number * (2 * world + 1) + 1, dtype=torch.int64, device=setup.device)
        for exchanged, row in zip(self._exchanged, mine[1:].view(number, 2 * world + 1), strict=True):
            row[:world], row[world:-1] = exchanged.sent, exchanged.received
            row[-1] = exchanged.sent.sum() != exchanged.before
        mine[0] = combined_digest(gradients)
        everyones = mine.new_empty(world, len(mine))
        with self.waiting():
            all_gather(everyones.view(-1), mine)  # all ranks exchange the same buckets
        everyones = everyones.cpu()
        if number:
            rows = everyones[:, 1:].view(world, number, -1)
            changed = rows[:, :, -1] != 0
            self._report_changed(step, changed[setup.rank].tolist())
            self._check_transport(step, rows[:, :, :world], rows[:, :, world:-1], changed)
        self._check_results(step, everyones[:, 0])

    def _exchanged_parameters(self) -> Iterator[torch.Tensor]:
        """Yield the parameters whose gradients the ranks have exchanged in this step.

        A rank gathers others for itself, such as those of an actor under ``no_sync``. Where an exchange is not visible,
        DistributedDataParallel tells whether its last forward pass prepared one.
        """
        for module in self._tap.replicas:
            if self._tap.sees_sums:
                yield from (p for p in module.parameters() if id(p) in self._seen)
            elif module.require_forward_param_sync:
                yield from module.parameters()

    def _report_changed(self, step: int, changed: Sequence[bool]) -> None:
        """Report a buffer that changed while it was sent."""
        number = next((number for number, is_changed in enumerate(changed) if is_changed), None)
        if number is None:
            return
        exchanged = self._exchanged[number]
        self.report_own(
            step,
            f"gradients sent in bucket {number}",
            original=to_hex(exchanged.sent.sum()),
            digest=to_hex(exchanged.before),
            difference="the buffer changed while it was sent",
        )

    def _check_transport(self, step: int, sent: torch.Tensor, received: torch.Tensor, changed: torch.Tensor) -> None:
        """Compare the digests of slices at senders and receivers.

        Args:
            sent: Of each sender, bucket and receiver.
            received: Of each receiver, bucket and sender.
            changed: Of each sender and bucket, whether the sender contradicts itself: its receivers are not accused.
        """
        places: list[list[int]] = ((sent != received.permute(2, 1, 0)) & ~changed[:, :, None]).nonzero().tolist()
        wrong = {(sender, receiver): bucket for sender, bucket, receiver in reversed(places)}
        for rank in (sender for sender, receiver in wrong if sender == receiver):
            self._report_own_slice(step, rank, wrong[rank, rank], sent, received)
        pairs = [pair for pair in wrong if pair[0] != pair[1]]
        named = witnessed(pairs)
        for rank, witnesses in sorted(named.items()):
            self._report_end(step, rank, witnesses)
        for sender, receiver in pairs:
            if sender not in named and receiver not in named:
                self._report_transport(step, sender, wrong[sender, receiver], receiver, sent, received)

    def _report_own_slice(self, step: int, rank: int, bucket: int, sent: torch.Tensor, received: torch.Tensor) -> None:
        """Report a slice that a rank keeps for itself and that is not what it was."""
        if self.setup.rank == rank:
            self.report_own(
                step,
                f"its own slice of bucket {bucket}",
                original=to_hex(received[rank, bucket, rank]),
                digest=to_hex(sent[rank, bucket, rank]),
            )

    def _report_end(self, step: int, rank: int, witnesses: list[int]) -> None:
        """Report a rank whose digests of slices differ from those of several other ranks at the other ends."""
        words = "its digests of slices are not those of the ranks that sent or received them"
        self._report_witnessed(step, "gradients that it exchanged", rank, witnesses, AS_SENT, NOT_AS_SENT, words)

    def _report_transport(
        self, step: int, sender: int, bucket: int, receiver: int, sent: torch.Tensor, received: torch.Tensor
    ) -> None:
        unit = f"slice of bucket {bucket} sent to rank {receiver}"
        if self.setup.rank == sender:
            digest = to_hex(sent[sender, bucket, receiver])
            mismatch = Mismatch(
                audit=self.kind, step=step, unit=unit, owner=sender, role=AuditRole.OWNER, original=digest
            )
            self.setup.report(mismatch)
        elif self.setup.rank == receiver:
            digest = to_hex(received[receiver, bucket, sender])
            self.setup.report(
                Mismatch(audit=self.kind, step=step, unit=unit, owner=sender, role=AuditRole.PEER, digest=digest)
            )

    def _check_results(self, step: int, everyones: torch.Tensor) -> None:
        """Compare the digests of the gradients that the ranks are about to use."""
        setup = self.setup
        digests = everyones.tolist()
        (common, count), *others = Counter(digests).most_common()
        if not others:
            return
        if 2 * count <= setup.world_size and setup.world_size > 2:
            self._warn_of_program(step)
            return
        agreeing = [rank for rank, digest in enumerate(digests) if digest == common]
        own = to_hex(everyones[setup.rank])
        for owner in (rank for rank, digest in enumerate(digests) if digest != common):
            self._report_witnessed(step, "gradients after the collective", owner, agreeing, own, own)

    def _warn_of_program(self, step: int) -> None:
        """Name the parameters whose gradients differ on most ranks, which no hardware explains. A collective."""
        parameters = list(self._exchanged_parameters())
        gradients = [torch.zeros(0) if p.grad is None or not is_strided(p.grad) else p.grad for p in parameters]
        device = self.setup.device
        mine = torch.stack([tensor_digest(gradient).to(device) for gradient in gradients])
        all_digests = mine.new_empty(self.setup.world_size, len(mine))
        with self.waiting():
            all_gather(all_digests.view(-1), mine)
        differ = (all_digests != all_digests[0]).any(0).tolist()
        if self.setup.rank != 0:
            return
        names = {id(p): name for module in self._tap.replicas for name, p in module.module.named_parameters()}
        found = [names.get(id(p), "a parameter") for p, is_other in zip(parameters, differ, strict=True) if is_other]
        log.warning(
            "step %d: after their exchange, gradients of %s differ between most ranks, so the program and not a GPU is "
            "the cause. Likely mistakes: layers unfrozen after the model was wrapped, or a second forward pass under "
            "no_sync",
            step,
            list_names(found, MAX_NAMED),
        )

    def _report_witnessed(
        self,
        step: int,
        unit: str,
        owner: int,
        candidates: Sequence[int],
        original: str,
        digest: str,
        difference: str = "",
    ) -> None:
        """Report on the owner and on two witnesses of the candidates, on different nodes if there are such.

        Args:
            original: What the owner states.
            digest: What a witness states.
            difference: What a witness says of the difference.
        """
        setup = self.setup
        peer = min(candidates, key=lambda rank: (setup.on_same_node(rank, owner), rank))
        others = [rank for rank in candidates if rank != peer]
        arbiter = choose_arbiter(owner, peer, setup.world_size, setup.nodes, others) if others else None
        role = {owner: AuditRole.OWNER, peer: AuditRole.PEER, arbiter: AuditRole.ARBITER}.get(setup.rank)
        if role is None:
            return
        is_owner = role is AuditRole.OWNER
        setup.report(
            Mismatch(
                audit=self.kind,
                step=step,
                unit=unit,
                owner=owner,
                role=role,
                original=original if is_owner else "",
                digest="" if is_owner else digest,
                expects_arbiter=arbiter is not None,
                difference="" if is_owner else difference,
            )
        )


def witnessed(pairs: Sequence[tuple[int, int]]) -> dict[int, list[int]]:
    """Return the ranks that are named by two others, with these witnesses.

    Two faults may meet in an honest rank: one partner sends it a wrong slice, and another one receives a right slice
    and gets its digest wrong. So both witnesses must have received from the rank, or both must have sent to it.

    Args:
        pairs: Sender and receiver of each slice whose digests differ; not the same rank.
    """
    sent_to, received_from = defaultdict[int, set[int]](set), defaultdict[int, set[int]](set)
    for sender, receiver in pairs:
        sent_to[sender].add(receiver)
        received_from[receiver].add(sender)
    ranks = sent_to.keys() | received_from.keys()
    others = {rank: sent_to[rank] | received_from[rank] for rank in ranks}  # those from which each one differs
    named = {}
    for rank in others:
        for ends in (sent_to[rank], received_from[rank]):
            # A rank that differs from several others may be wrong itself, and is no witness.
            witnesses = sorted(end for end in ends if others[end] == {rank})
            if len(witnesses) > 1:
                named[rank] = witnesses
                break
    return named


@cache
def _real_weights(count: int, device: torch.device) -> torch.Tensor:
    """Return random weights of either sign with magnitudes from 0.75 to 1: no equal errors cancel out."""
    generator = torch.Generator().manual_seed(21)
    magnitudes = torch.rand(count, generator=generator) / 4 + 0.75
    return (magnitudes * (torch.randint(0, 2, (count,), generator=generator) * 2 - 1)).to(device)


def row_digests(rows: Sequence[torch.Tensor] | torch.Tensor) -> torch.Tensor:
    """Return the digest of each row, at its place in the whole: the sum is the digest of all."""
    places = accumulate(map(len, rows), initial=0)
    return torch.stack([tensor_digest(row, offset=place) for place, row in zip(places, rows, strict=False)])


def weighted_sums(rows: torch.Tensor) -> torch.Tensor:
    """Return (weighted sum, sum of squares) of each row, in float64."""
    result = torch.zeros(len(rows), 2, dtype=torch.float64, device=rows.device)
    wide = torch.promote_types(rows.dtype, torch.float32)
    inner, outer = (_real_weights(count, rows.device) for count in (COLUMNS, BLOCKS))
    for place, row in enumerate(rows):
        values = row.to(wide)
        whole = len(values) // COLUMNS
        sums = torch.mv(values[: whole * COLUMNS].view(whole, COLUMNS), inner.to(wide)).double()
        for first in range(0, whole, BLOCKS):
            some = sums[first : first + BLOCKS]
            result[place, 0] += torch.dot(some, outer[: len(some)].double())
        rest = values[whole * COLUMNS :]
        result[place, 0] += torch.dot(rest, inner[: len(rest)].to(wide))
        result[place, 1] = torch.linalg.vector_norm(values).double().square()
    result[:, 1] += rows.shape[1] * torch.finfo(wide).tiny  # squares of less are zero
    return result
