"""Compute a part of each rank's work again on another rank: the audit PEER_REPLAY of the chain.

At a due step each rank captures one call of one unit, the same on all ranks. Before the update it sends the captured
inputs to a partner, and does the call of another rank again. All ranks then compare the digests of all results. If some
differ, a third rank does that call again, and each rank states what it computed; the controller judges.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from everstep.vocabulary import AuditKind, AuditRole
from everstep_trainer.digests.digest import combined_digest, to_hex
from everstep_trainer.parallel.replicas import find_model_parallelism
from everstep_trainer.sdc.audit import Audit, AuditSetup, Mismatch
from everstep_trainer.sdc.replay.call_replay import replay
from everstep_trainer.sdc.replay.call_transfer import decode_call, encode_call
from everstep_trainer.sdc.replay.capture import Capture, CapturedCall, PassRecord, UnsupportedUnit
from everstep_trainer.sdc.replay.determinism import are_close, find_unrepeatable, relative_spread
from everstep_trainer.sdc.replay.memory import MemoryLevels, describe_shortage, read_memory_levels
from everstep_trainer.sdc.replay.units import Unit, find_units
from everstep_trainer.sdc.witnesses import all_gather_numbers, choose_arbiter, describe_difference, exchange
from everstep_trainer.state.tensors import list_names

log = logging.getLogger(__name__)

MAX_NAMED = 8
"""Most modules named in a log line."""
MAX_SKIPS = 8
"""Audits of a unit in a row that compared nothing; it is then audited no more, and no longer waited for."""
_SPREAD_SCALE = 1e12  # a spread travels as a whole number
_CAPTURED, _NOT_CALLED, _UNSUPPORTED, _MIXED, _SHORT = range(5)

Parts = tuple[int, int, int]
"""Digests of the outputs, of the contributions to gradients of inputs, and to those of parameters."""


@dataclass(eq=False)
class _UnitRotation:
    """A unit and what is known about it, the same on all ranks.

    Attributes:
        number: Its place among all units.
        calls: Its calls in a step.
        visits: Audits so far, with those that were skipped.
        skips: Audits that were skipped since the last one that was not.
        spread: Relative difference of two replays, if it is not bitwise repeatable.
        has_mixed_gradients: Gradients enter it at places where they cannot be read apart.
        noted: Reasons of skipped audits that were logged.
    """

    unit: Unit
    number: int
    calls: int = 1
    visits: int = 0
    skips: int = 0
    spread: float | None = None
    has_mixed_gradients: bool = False

    def __post_init__(self) -> None:
        self.noted: set[str] = set()

    @property
    def call(self) -> int:
        return self.visits % self.calls

    @property
    def outputs_only(self) -> str:
        if self.has_mixed_gradients:
            return "the loss uses an output from which another output is computed"
        return "" if self.spread is None else "it is not bitwise repeatable"


@dataclass(frozen=True)
class _Case:
    """One audit in progress. ``claimed``: what training used, by rank; ``replayed``: what its partner computed."""

    step: int
    rotation: _UnitRotation
    call: int
    captured: CapturedCall
    shift: int
    claimed: tuple[Parts, ...]
    replayed: tuple[Parts, ...]

    @property
    def name(self) -> str:
        return f"{self.rotation.unit.name}, micro-batch {self.call}"

    @property
    def owners(self) -> list[int]:
        return [
            rank
            for rank, (digest, other) in enumerate(zip(self.claimed, self.replayed, strict=True))
            if digest != other
        ]

    def peer(self, owner: int) -> int:
        return (owner + self.shift) % len(self.claimed)


class PeerReplay(Audit):
    """The audit PEER_REPLAY of one rank in one generation. Switched off if ranks do not compute whole models."""

    kind = AuditKind.PEER_REPLAY

    def __init__(self, setup: AuditSetup) -> None:
        super().__init__(setup)
        self._rotations: list[_UnitRotation] = []
        self._left_out: set[int] = set()
        self._rounds = 0
        self._whole_numbers: dict[Unit, int] = {}  # of models that may take the place of their blocks
        self._compared: int | None = None  # in this step
        self._audits = 0
        self._current: tuple[_UnitRotation, Capture] | None = None
        self._shortage = ""  # why the running step is not captured
        self._off = ""  # why this audit is
        self._reasons: list[tuple[nn.Module, str]] = []  # why modules are left out
        if setup.world_size == 1:
            self._off = "it needs a second rank"
            return
        sign = "" if setup.has_replica_per_rank else "a model spans several ranks"
        if sign := sign or find_model_parallelism(setup.objects.values(), setup.world_size):
            self._off = sign
            return
        found = find_units(setup.objects)
        self._rotations = [_UnitRotation(unit, number) for number, unit in enumerate(found.units)]
        wholes = dict.fromkeys(unit.whole for unit in found.units if unit.is_block and unit.whole is not None)
        self._whole_numbers = {whole: len(found.units) + number for number, whole in enumerate(wholes)}
        self._left_out = set(self._whole_numbers.values())  # until no block is left
        self._rounds = len(found.units) + len(wholes)
        self._reasons = [(module, unit.reason) for unit in found.left_out for module in unit.module.modules()]
        if not found.units:
            self._off = "no tracked module can be computed again on another rank"

    @property
    def rounds(self) -> int:
        return self._rounds

    def compared_part(self, turn: int) -> int | None:
        return self._compared

    @property
    def left_out(self) -> Collection[int]:
        return self._left_out

    def checked_modules(self) -> Iterator[nn.Module]:
        for rotation in self._rotations:
            yield from rotation.unit.module.modules()

    def left_out_modules(self) -> Sequence[tuple[nn.Module, str]]:
        return self._reasons

    def gaps(self) -> Iterator[str]:
        if self._off:
            yield f"audit peer_replay is off: {self._off}"
        partly = [rotation for rotation in self._rotations if rotation.outputs_only]
        for reason in dict.fromkeys(rotation.outputs_only for rotation in partly):
            names = [rotation.unit.name for rotation in partly if rotation.outputs_only == reason]
            yield f"only the forward pass of {list_names(names, MAX_NAMED)} is checked ({reason})"

    def begin_step(self, step: int, *, due: bool) -> None:
        self._drop()
        self._compared = None
        if not due or not self._rotations:
            return
        rotation = min(self._rotations, key=lambda one: one.visits)
        capture = Capture(rotation.unit, rotation.call, self.setup.device, self.cost, rotation.outputs_only)
        self._shortage = self._describe_shortage(rotation.unit)
        if not self._shortage:
            capture.install()
        self._current = rotation, capture

    def before_update(self, step: int, *, due: bool) -> None:
        if self._current is None:
            return
        rotation, capture = self._current
        try:
            capture.remove()
            self._audit(step, rotation, capture)
        finally:
            self._drop()

    def close(self) -> None:
        self._drop()

    def _drop(self) -> None:
        if self._current is not None:
            self._current[1].clear()
            self._current = None

    def read_memory(self) -> MemoryLevels | None:
        """Return the memory that a replay may take; see `read_memory_levels`."""
        return read_memory_levels(self.setup.device)

    # ---- one audit

    def _audit(self, step: int, rotation: _UnitRotation, capture: Capture) -> None:
        """Compare the captured calls of all ranks. A collective."""
        self._audits += 1
        call, captured = rotation.call, capture.captured
        state = _SHORT if self._shortage else _state_of(capture)
        structure = 0 if captured is None else captured.structure()
        rows = self._gather([state, structure, capture.calls])
        rotation.visits += 1
        rotation.calls = max(1, min(calls for _, _, calls in rows))
        states = {state for state, _, _ in rows}
        if _UNSUPPORTED in states:
            self._exclude(rotation, capture.problem or "another rank cannot capture it", tries_whole=True)
        elif _SHORT in states:
            self._note(rotation, self._shortage or "another rank has no memory for its audit")
        elif _MIXED in states:  # the next audit compares the outputs
            rotation.has_mixed_gradients = True
        elif _NOT_CALLED in states:
            self._note(rotation, "some ranks did not call it in the audited step", tries_whole=True)
        elif len({structure for _, structure, _ in rows}) > 1:
            self._note(rotation, "the ranks call it with different arguments, or with other random numbers or modes")
        elif captured is not None:
            if captured.record.outputs_only and rotation.spread is None:
                self._note(rotation, f"only its forward pass is audited: {captured.record.outputs_only}", skipped=False)
            with rotation.unit.gathered():
                self._compare(step, rotation, call, captured)

    def _compare(self, step: int, rotation: _UnitRotation, call: int, captured: CapturedCall) -> None:
        world = self.setup.world_size
        shift = 1 + (self._audits + self._audits // len(self._rotations)) % (world - 1)
        to, source = (self.setup.rank + shift) % world, (self.setup.rank - shift) % world
        claimed = self._parts(captured.record)
        message = self._exchange(encode_call(captured), to, source)
        reference: list[torch.Tensor] = []
        if rotation.spread is not None:
            values = captured.record.output_values()
            reference = self._exchange([value.reshape(-1) for value in values], to, source)
        theirs, record, failure = self._redo(rotation.unit, message, captured)
        replayed: Parts = (0, 0, 0)
        if theirs is not None and record is not None:
            replayed = self._stated(rotation, record, [(self._parts(theirs.record), reference)])
        rows = self._gather([self._state_digest(rotation.unit), bool(failure), *claimed, *replayed])
        if any(failed for _, failed, *_ in rows):
            self._exclude(rotation, failure or "another rank cannot compute it again")
            return
        if len({digest for digest, *_ in rows}) > 1:
            self._note(rotation, "the ranks hold different parameters or buffers")
            return
        by_owner = [rows[(owner + shift) % world] for owner in range(world)]
        case = _Case(
            step,
            rotation,
            call,
            captured,
            shift,
            claimed=tuple(_as_parts(row[2:5]) for row in rows),
            replayed=tuple(_as_parts(row[5:8]) for row in by_owner),
        )
        rotation.skips = 0
        if case.owners:
            self._investigate(case, record, theirs)
        else:
            self._compared = rotation.number

    def _redo(
        self, unit: Unit, message: Sequence[torch.Tensor], own: CapturedCall
    ) -> tuple[CapturedCall | None, PassRecord | None, str]:
        """Return the call of another rank and this rank's results of it, or why it cannot be done again here."""
        try:
            theirs = decode_call(message, own, self.setup.device)
            return theirs, replay(unit, theirs, self.setup.device), ""
        except Exception as error:  # noqa: BLE001 - a module may raise anything
            return None, None, f"{type(error).__name__}: {error}"

    def _state_digest(self, unit: Unit) -> int:
        """Return the digest of what a call reads besides its inputs."""
        changing = unit.changing_buffers or set()
        constant = [buffer for name, buffer in unit.module.named_buffers() if name not in changing]
        return int(combined_digest([*unit.module.parameters(), *constant]).item())

    def _parts(self, record: PassRecord) -> Parts:
        digests = torch.stack([part.to(self.setup.device) for part in record.parts()]).tolist()
        if record.outputs_only:
            return digests[0], 0, 0
        return digests[0], digests[1], digests[2]

    def _stated(
        self, rotation: _UnitRotation, record: PassRecord, references: Sequence[tuple[Parts, Sequence[torch.Tensor]]]
    ) -> Parts:
        """Return the digests that stand for a replay: of a unit that varies, those of the first reference close to it.

        Args:
            references: Results of other ranks: digests, and the bytes of the outputs.
        """
        parts = self._parts(record)
        if rotation.spread is None:
            return parts
        own = record.output_values()
        for stated, values in references:
            if len(values) == len(own):
                theirs = [
                    value.to(own_value.device).view(own_value.dtype).view(own_value.shape)
                    for value, own_value in zip(values, own, strict=True)
                ]
                if are_close(theirs, own, rotation.spread):
                    return stated
        return parts

    # ---- after a difference

    def _investigate(self, case: _Case, record: PassRecord | None, theirs: CapturedCall | None) -> None:
        """Find out who computes wrongly, or that the unit is not repeatable. A collective.

        Args:
            record: This rank's replay of its partner's call.
            theirs: That call.
        """
        world, rotation = self.setup.world_size, case.rotation
        reruns, failure = self._rerun(case)
        first, second = (self._parts(rerun) for rerun in reruns)
        spread = relative_spread(reruns[0].output_values(), reruns[1].output_values())
        rows = self._gather([*first, *second, round(min(spread, 1e6) * _SPREAD_SCALE), bool(failure)])
        if any(row[7] for row in rows):
            self._exclude(rotation, failure or "another rank cannot compute its own call again")
            return
        varied = [rank for rank, row in enumerate(rows) if row[:3] != row[3:6]]
        if rotation.spread is None:
            if len(varied) > 1:  # a faulty rank varies alone
                self._tolerate(case, varied, max(row[6] for row in rows) / _SPREAD_SCALE)
                return
            changed = [rank for rank, row in enumerate(rows) if _as_parts(row[:3]) != case.claimed[rank]]
            if len(changed) == world or len(case.owners) > max(2, world // 2):
                self._exclude(rotation, "it gives other results on most ranks when it is computed again")
                return
        elif len(case.owners) > max(2, world // 2):
            self._exclude(rotation, "its results vary too much to be compared")
            return
        for owner in case.owners:
            self._state(case, owner, reruns[0], record, theirs)

    def _rerun(self, case: _Case) -> tuple[list[PassRecord], str]:
        """Return two results of this rank's own call done again, or its record and why that cannot be done."""
        try:
            return [replay(case.rotation.unit, case.captured, self.setup.device) for _ in range(2)], ""
        except Exception as error:  # noqa: BLE001 - a module may raise anything
            return [case.captured.record] * 2, f"{type(error).__name__}: {error}"

    def _tolerate(self, case: _Case, varied: Sequence[int], spread: float) -> None:
        """Compare the unit's outputs by tolerance from now on. No collective."""
        rotation = case.rotation
        rotation.spread = spread
        if self.setup.rank != varied[0]:
            return
        try:
            found = find_unrepeatable(rotation.unit, case.captured, self.setup.device)
        except Exception as error:  # noqa: BLE001 - a module may raise anything
            log.debug("the modules of %s cannot be computed one by one: %s", rotation.unit.name, error)
            found = {}
        named = [f"{name or 'code between its modules'} ({results})" for name, results in found.items()]
        log.warning(
            "%s is not bitwise repeatable: %s. Audits compare only its outputs from now on, to %.1g of the largest "
            "element: smaller errors and errors of its backward pass go unseen. Deterministic kernels "
            "(torch.use_deterministic_algorithms) restore full coverage",
            rotation.unit.name,
            ", ".join(named[:MAX_NAMED]) or "the module is not known",
            max(spread, 1e-7),
        )

    def _state(
        self, case: _Case, owner: int, rerun: PassRecord, record: PassRecord | None, theirs: CapturedCall | None
    ) -> None:
        """Have the owner, its peer and an arbiter state what they computed for the owner's call. A collective."""
        rank, world, rotation, device = self.setup.rank, self.setup.world_size, case.rotation, self.setup.device
        peer = case.peer(owner)
        arbiter = choose_arbiter(owner, peer, world, self.setup.nodes) if world > 2 else None
        to_arbiter = arbiter if rank == owner else None
        from_owner = owner if rank == arbiter else None
        sent = exchange(encode_call(case.captured), to=to_arbiter, source=from_owner, device=device)
        references = self._references(case, owner, peer, arbiter, record)
        examined, claims, failed = record, theirs, False
        stated: Parts = case.replayed[owner]
        if rank == arbiter:
            claims, examined, failure = self._redo(rotation.unit, sent, case.captured)
            failed = bool(failure)
            if examined is not None:
                stated = self._stated(rotation, examined, references)
        has_arbiter = arbiter is not None and not any(row[0] for row in self._gather([failed]))
        examiner = arbiter if has_arbiter and arbiter is not None else peer
        difference = self._describe_difference(case, owner, examiner, examined, claims)
        original = case.claimed[owner]
        unit = f"{rotation.unit.name} {_describe_pass(original, case.replayed[owner])}, micro-batch {case.call}"
        statements = {
            owner: (AuditRole.OWNER, self._stated(rotation, rerun, references)),
            peer: (AuditRole.PEER, case.replayed[owner]),
        }
        if has_arbiter and arbiter is not None:
            statements[arbiter] = (AuditRole.ARBITER, stated)
        if rank in statements:
            role, parts = statements[rank]
            self.setup.report(
                Mismatch(
                    audit=self.kind,
                    step=case.step,
                    unit=unit,
                    owner=owner,
                    role=role,
                    original=_in_hex(original) if role is AuditRole.OWNER else "",
                    digest=_in_hex(parts),
                    expects_arbiter=has_arbiter,
                    difference=difference,
                )
            )

    def _references(
        self, case: _Case, owner: int, peer: int, arbiter: int | None, record: PassRecord | None
    ) -> list[tuple[Parts, Sequence[torch.Tensor]]]:
        """Give owner and arbiter the outputs of owner and peer, if they are compared by tolerance. A collective."""
        if case.rotation.spread is None:
            return []
        rank, device = self.setup.rank, self.setup.device
        outputs = [value.reshape(-1) for value in case.captured.record.output_values()] if rank == owner else []
        found: list[tuple[Parts, Sequence[torch.Tensor]]] = []
        replayed = (
            [value.reshape(-1) for value in record.output_values()] if rank == peer and record is not None else []
        )
        if rank == owner:
            found.append((case.claimed[owner], [output.contiguous().view(torch.uint8) for output in outputs]))
        if arbiter is not None:
            to, source = _if(rank == owner, arbiter), _if(rank == arbiter, owner)
            from_owner = exchange(outputs, to=to, source=source, device=device)
            to, source = _if(rank == peer, arbiter), _if(rank == arbiter, peer)
            from_peer = exchange(replayed, to=to, source=source, device=device)
            if rank == arbiter:
                found += [(case.claimed[owner], from_owner), (case.replayed[owner], from_peer)]
        from_peer = exchange(replayed, to=_if(rank == peer, owner), source=_if(rank == owner, peer), device=device)
        if rank == owner:
            found.append((case.replayed[owner], from_peer))
        return found

    def _describe_difference(
        self, case: _Case, owner: int, examiner: int, examined: PassRecord | None, claims: CapturedCall | None
    ) -> str:
        """Return on the examiner what differs between the owner's result and its own. A collective."""
        rank, device = self.setup.rank, self.setup.device
        number = -1
        if rank == examiner and examined is not None and claims is not None:
            number = first_difference(claims.record, examined)
        question = exchange(
            [torch.tensor([number])],
            to=owner if rank == examiner else None,
            source=_if(rank == owner, examiner),
            device=device,
        )
        answer: list[torch.Tensor] = []
        if rank == owner:
            asked = int(question[0].view(torch.int64).item())
            try:
                answer = [case.captured.record.value(asked)] if asked >= 0 else []
            except UnsupportedUnit:
                answer = []
        found = exchange(
            [tensor.reshape(-1) for tensor in answer],
            to=examiner if rank == owner else None,
            source=_if(rank == examiner, owner),
            device=device,
        )
        if rank != examiner or examined is None:
            return ""
        if number < 0:
            return "the owner's result was computed again without a difference"
        name = examined.items[number].name
        held = examined.values[number]
        if not found or held is None:
            return f"{name} differs; its bits were not kept"
        return f"{name}: {describe_difference(found[0], held[0]) or 'the bits kept are equal'}"

    # ---- coverage

    def _exclude(self, rotation: _UnitRotation, reason: str, *, tries_whole: bool = False) -> None:
        """Audit the unit no more in this generation, on all ranks.

        Args:
            rotation: The unit.
            reason: Why.
            tries_whole: The unit cannot be called by itself, so that the whole model may take its place.
        """
        self._log("audit peer_replay does not cover %s: %s", rotation.unit.name, reason)
        self._rotations.remove(rotation)
        self._left_out.add(rotation.number)
        self._reasons += [(module, reason) for module in rotation.unit.module.modules()]
        if tries_whole and rotation.unit.is_block and rotation.unit.whole is not None:
            self._use_whole(rotation.unit.whole)

    def _use_whole(self, whole: Unit) -> None:
        """Audit a model as one unit if no block of it is left."""
        others = [rotation for rotation in self._rotations if rotation.unit.whole is whole]
        if any(other.unit.is_block for other in others):
            return
        number = self._whole_numbers[whole]
        self._left_out |= {other.number for other in others}
        self._left_out.remove(number)
        self._rotations = [rotation for rotation in self._rotations if rotation not in others]
        visits = min((rotation.visits for rotation in self._rotations), default=0)
        self._rotations.append(_UnitRotation(whole, number, visits=visits))
        self._log("audit peer_replay computes %s as a whole again, since no block of it can be", whole.name)

    def _describe_shortage(self, unit: Unit) -> str:
        nodes, rank = self.setup.nodes, self.setup.rank
        is_shared = self.setup.device.type == "cpu" and nodes
        return describe_shortage(unit, self.read_memory(), nodes.count(nodes[rank]) if is_shared else 1)

    def _note(self, rotation: _UnitRotation, reason: str, *, skipped: bool = True, tries_whole: bool = False) -> None:
        if reason not in rotation.noted:
            rotation.noted.add(reason)
            self._log("audit peer_replay%s: %s: %s", " was skipped" if skipped else "", rotation.unit.name, reason)
        rotation.skips += skipped
        if rotation.skips == MAX_SKIPS:
            words = f"{reason} ({MAX_SKIPS} audits in a row were skipped)"
            self._exclude(rotation, words, tries_whole=tries_whole)

    def _log(self, line: str, *values: object) -> None:
        if self.setup.rank == 0:
            log.info(line, *values)

    def _gather(self, numbers: Sequence[int]) -> list[list[int]]:
        with self.waiting():
            return all_gather_numbers(numbers, self.setup.world_size, self.setup.device)

    def _exchange(self, tensors: Sequence[torch.Tensor], to: int, source: int) -> list[torch.Tensor]:
        with self.waiting():
            return exchange(tensors, to=to, source=source, device=self.setup.device)


def first_difference(claims: PassRecord, record: PassRecord) -> int:
    """Return the number of the first result whose digest differs, or -1."""
    for number, (claimed, other) in enumerate(zip(claims.digests, record.digests, strict=True)):
        if claimed is not None and other is not None and int(claimed.item()) != int(other.item()):
            return number
    return -1


def _state_of(capture: Capture) -> int:
    if capture.captured is None:
        return _UNSUPPORTED if capture.problem else _NOT_CALLED
    return _MIXED if capture.captured.record.has_mixed_gradients else _CAPTURED


def _describe_pass(original: Parts, replayed: Parts) -> str:
    return "forward" if original[0] != replayed[0] else "backward"


def _as_parts(numbers: Sequence[int]) -> Parts:
    outputs, inputs, parameters = numbers
    return outputs, inputs, parameters


def _in_hex(parts: Parts) -> str:
    return to_hex(combined_digest([torch.tensor(parts, dtype=torch.int64)]))


def _if(condition: bool, rank: int | None) -> int | None:
    return rank if condition else None
