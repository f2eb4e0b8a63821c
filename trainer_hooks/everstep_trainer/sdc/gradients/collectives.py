"""Check that gradients are added and distributed correctly by the collective between ranks.

Four checks, each for another place where bytes or sums may go wrong:

* Rest: the digest of a gradient when it arrived at its parameter equals its digest when the exchange begins. A
  difference is the rank's own.
* Transport: the digest of each slice at the sender equals its digest at the receiver. A difference accuses both. Two
  receivers that differ from one sender convict it.
* Sum: a weighted sum over a rank's slice equals the total of the weighted sums of what it received, up to rounding.
  Random weights make sure that no pattern of errors cancels out. A difference is the rank's own.
* Result: all replicas hold equal gradients before the update. A strict majority names the rank that differs.

Under ``fully_shard`` nothing of this is visible, and no two ranks hold equal gradients, so the link is off there.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from functools import cache

import torch
import torch.distributed as dist
from torch.utils.hooks import RemovableHandle

from everstep.vocabulary import AuditLink, AuditRole
from everstep_trainer.parallel.exact.summation import all_gather
from everstep_trainer.sdc.audit import Audit, AuditSetup, Mismatch
from everstep_trainer.sdc.digests.digest import combined_digest, float_hex, tensor_digest, to_hex
from everstep_trainer.sdc.gradients.gradient_exchange import GradientReader, GradientTap

log = logging.getLogger(__name__)

COLUMNS = 32768
"""Elements of a slice that are added up at once: the weights stay in the second-level cache."""
ROUNDING_SIGMAS = 8.0
"""Standard deviations of rounding that a sum may be off. Each of the W - 1 additions of an element rounds by at most
eps / sqrt(12) of its result in the mean, and no partial sum is larger than the addends and the total together."""
AS_SENT, NOT_AS_SENT = "0" * 16, "f" * 16
"""What a sender and its receivers state in place of digests, since each of them has another slice."""
MAX_BUCKETS = 64
"""Most buckets of one step that are checked."""


class Collectives(Audit, GradientReader):
    """AuditLink.COLLECTIVE on one rank."""

    link = AuditLink.COLLECTIVE

    def __init__(self, setup: AuditSetup, tap: GradientTap) -> None:
        super().__init__(setup)
        self._tap = tap
        self._is_on = setup.has_replica_per_rank and setup.world_size > 1 and bool(tap.replicas)
        if not self._is_on and setup.rank == 0:
            log.info("sums of gradients are not checked: this needs DistributedDataParallel")
        self._sent: list[torch.Tensor] = []  # digests of slices, by receiver
        self._received: list[torch.Tensor] = []  # the same, by sender
        self._sums: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []  # got, expected, tolerance
        self._parts = torch.zeros(2, dtype=torch.float64)
        self._is_reading = False
        self._accumulated: dict[int, torch.Tensor] = {}  # digests of gradients, by the parameter's id
        self._changed: list[tuple[torch.Tensor, torch.Tensor]] = []  # digests then and when the exchange began
        self._hooks: list[RemovableHandle] = []

    @property
    def rounds(self) -> int:
        return 1 if self._is_on else 0

    def begin_step(self, step: int, *, due: bool) -> None:
        if self._is_on and due:
            for kept in (self._sent, self._received, self._sums, self._changed):
                kept.clear()
            self._accumulated.clear()
            self._is_reading = True
            self._tap.open(self)
            if self._tap.sees_sums:
                for parameter in (one for module in self._tap.replicas for one in module.parameters()):
                    if parameter.requires_grad:
                        self._watch(parameter)

    def _watch(self, parameter: torch.Tensor) -> None:
        """Digest the parameter's gradient when it arrives, or when it was added to those of earlier micro-batches."""

        def arrives(gradient: torch.Tensor) -> None:
            with self.cost():
                if parameter.grad is None and gradient.dtype == parameter.dtype:
                    self._accumulated[id(parameter)] = tensor_digest(gradient)
                else:
                    self._accumulated.pop(id(parameter), None)

        def is_added(parameter: torch.Tensor) -> None:
            with self.cost():
                if id(parameter) not in self._accumulated and parameter.grad is not None:
                    self._accumulated[id(parameter)] = tensor_digest(parameter.grad)

        self._hooks.append(parameter.register_hook(arrives))  # type: ignore[no-untyped-call]
        self._hooks.append(parameter.register_post_accumulate_grad_hook(is_added))  # type: ignore[no-untyped-call]

    def on_local(
        self, parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], slices: torch.Tensor
    ) -> None:
        if self._tap.sees_sums and len(self._sent) < MAX_BUCKETS:
            with self.cost():
                self._sent.append(row_digests(slices))
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    if (before := self._accumulated.pop(id(parameter), None)) is not None:
                        self._changed.append((before, tensor_digest(gradient)))

    def on_received(self, slices: torch.Tensor) -> None:
        if len(self._received) < MAX_BUCKETS:
            with self.cost():
                self._received.append(row_digests(slices))
                self._parts = weighted_sums(slices)

    def on_sum(self, total: torch.Tensor) -> None:
        if len(self._sums) < len(self._received):
            with self.cost():
                got, squares_of_total = weighted_sums(total[None])[0]
                expected = self._parts[:, 0].sum()
                squares = (len(self._parts) - 1) * (squares_of_total + self._parts[:, 1].sum())
                tolerance = ROUNDING_SIGMAS * torch.finfo(total.dtype).eps * (squares / 12).sqrt()
                self._sums.append((got, expected, tolerance))

    def before_update(self, step: int, *, due: bool) -> None:
        if not self._is_reading:
            return
        self._is_reading = False
        self.close()
        self._check_rest(step)
        self._check_sums(step)
        self._check_transport(step)
        self._check_results(step)

    def close(self) -> None:
        self._tap.close(self)
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _check_rest(self, step: int) -> None:
        """Compare gradients with what they were when they arrived at their parameters."""
        if not self._changed:
            return
        before, now = (torch.stack(each) for each in zip(*self._changed, strict=True))
        different = (before != now).nonzero().flatten().tolist()
        if different:
            self.setup.report(
                Mismatch(
                    link=self.link,
                    step=step,
                    unit="gradients before the exchange",
                    owner=self.setup.rank,
                    role=AuditRole.OWNER,
                    original=to_hex(now[different[0]]),
                    digest=to_hex(before[different[0]]),
                    difference=f"{len(different)} of {len(before)} gradients changed after they had arrived",
                )
            )

    def _check_sums(self, step: int) -> None:
        for bucket, (got, expected, tolerance) in enumerate(self._sums):
            error = abs(float(got) - float(expected))
            if error <= float(tolerance) or not torch.isfinite(expected):  # infinite gradients are the model's
                continue
            self.setup.report(
                Mismatch(
                    link=self.link,
                    step=step,
                    unit=f"sum of bucket {bucket}",
                    owner=self.setup.rank,
                    role=AuditRole.OWNER,
                    original=float_hex(got),
                    digest=float_hex(expected),
                    difference=f"the sum is off by {error:.3g}, rounding explains {float(tolerance):.3g}",
                )
            )

    def _check_transport(self, step: int) -> None:
        """Compare the digests of slices at senders and receivers."""
        setup, world = self.setup, self.setup.world_size
        if not self._tap.sees_sums:
            return
        buckets = torch.tensor([len(self._sent)], device=setup.device)
        dist.all_reduce(buckets, op=dist.ReduceOp.MAX)
        number = int(buckets.item())
        mine = torch.zeros(2, number, world, dtype=torch.int64, device=setup.device)
        for place, (sent, received) in enumerate(zip(self._sent, self._received, strict=True)):
            mine[0, place], mine[1, place] = sent, received
        if not number:
            return
        everyones = mine.new_empty(world, 2, number, world)
        all_gather(everyones.view(-1), mine.view(-1))
        sent, received = everyones[:, 0], everyones[:, 1]  # sender x bucket x receiver; receiver x bucket x sender
        places: list[list[int]] = (sent != received.permute(2, 1, 0)).nonzero().tolist()
        wrong = [(sender, bucket, receiver) for sender, bucket, receiver in places]
        receivers = {sender: sorted({to for one, _, to in wrong if one == sender}) for sender, _, _ in wrong}
        for sender, to in receivers.items():
            # A receiver that is wrong itself differs from several senders.
            trusted = [rank for rank in to if rank != sender and sum(rank in each for each in receivers.values()) == 1]
            if len(trusted) > 1:
                self._report_sender(step, sender, trusted)
            else:
                bucket, receiver = next((b, r) for s, b, r in wrong if s == sender)
                self._report_transport(step, sender, bucket, receiver, sent, received)

    def _report_sender(self, step: int, sender: int, receivers: list[int]) -> None:
        """Report a sender from whom several ranks received something else than it says it has sent."""
        words = "its digest of what it sent is not that of what arrived"
        self._report_witnessed(step, "gradients that it sent", sender, receivers, AS_SENT, NOT_AS_SENT, words)

    def _report_transport(
        self, step: int, sender: int, bucket: int, receiver: int, sent: torch.Tensor, received: torch.Tensor
    ) -> None:
        unit = f"slice of bucket {bucket} sent to rank {receiver}"
        if self.setup.rank == sender:
            digest = to_hex(sent[sender, bucket, receiver])
            mismatch = Mismatch(
                link=self.link, step=step, unit=unit, owner=sender, role=AuditRole.OWNER, original=digest
            )
            self.setup.report(mismatch)
        elif self.setup.rank == receiver:
            digest = to_hex(received[receiver, bucket, sender])
            self.setup.report(
                Mismatch(link=self.link, step=step, unit=unit, owner=sender, role=AuditRole.PEER, digest=digest)
            )

    def _check_results(self, step: int) -> None:
        """Compare the gradients that the ranks are about to use."""
        if not self._tap.replicas:
            return
        setup = self.setup
        gradients = [p.grad for module in self._tap.replicas for p in module.parameters() if p.grad is not None]
        mine = combined_digest(gradients).reshape(1).to(setup.device)
        everyones = mine.new_empty(setup.world_size)
        all_gather(everyones, mine)
        digests = everyones.tolist()
        (common, count), *others = Counter(digests).most_common()
        if not others:
            return
        if 2 * count <= setup.world_size and setup.world_size > 2:
            log.error("step %d: gradients differ between ranks without a majority", step)
            return
        agreeing = [rank for rank, digest in enumerate(digests) if digest == common]
        own = to_hex(everyones[setup.rank])
        for owner in (rank for rank, digest in enumerate(digests) if digest != common):
            self._report_witnessed(step, "gradients after the collective", owner, agreeing, own, own)

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
        rest = [rank for rank in candidates if rank != peer]
        arbiter = min(
            rest, key=lambda rank: (setup.on_same_node(rank, owner), setup.on_same_node(rank, peer), rank), default=None
        )
        role = {owner: AuditRole.OWNER, peer: AuditRole.PEER, arbiter: AuditRole.ARBITER}.get(setup.rank)
        if role is None:
            return
        is_owner = role is AuditRole.OWNER
        setup.report(
            Mismatch(
                link=self.link,
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


@cache
def _real_weights(device: torch.device) -> torch.Tensor:
    """Return random weights of either sign with magnitudes from 0.5 to 1: no equal errors cancel out."""
    generator = torch.Generator().manual_seed(21)
    magnitudes = torch.rand(COLUMNS, generator=generator) / 2 + 0.5
    return (magnitudes.double() * (torch.randint(0, 2, (COLUMNS,), generator=generator) * 2 - 1)).to(device)


def row_digests(rows: torch.Tensor) -> torch.Tensor:
    """Return the digest of each row."""
    return torch.stack([tensor_digest(row) for row in rows])


def weighted_sums(rows: torch.Tensor) -> torch.Tensor:
    """Return (weighted sum, sum of squares) of each row, in float64."""
    result = torch.zeros(len(rows), 2, dtype=torch.float64, device=rows.device)
    for first in range(0, rows.shape[1], COLUMNS):
        block = rows[:, first : first + COLUMNS].double()  # float32 would round more than the sums that are checked
        result[:, 0] += torch.mv(block, _real_weights(rows.device)[: block.shape[1]])
        result[:, 1] += block.square().sum(dim=1)
    return result
