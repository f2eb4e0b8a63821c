"""Simulate a machine's vault process, which writes shares to storage and makes parity.

The vault outlives agents, and can be killed. The shares that it reads must be sealed and intact at the beginning and at
the end of a request. If a slot was filled again meanwhile, the request fails.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import msgspec

from everstep.errors import DigestMismatch, EverstepError, NotFound, StaleGeneration, Unavailable
from everstep.ids import Version
from everstep.layout.stored_checkpoints import folder_name
from everstep.wire.v1.local import Protect, Protected, RequestFailed, Spill, Spilled
from tests.sim.cluster.observations import CheckpointCompleted, ParityMade
from tests.sim.processes.vault_memory import Parity, Slot

if TYPE_CHECKING:
    from tests.sim.cluster.event_loop import VirtualLoop
    from tests.sim.cluster.machine import Machine

LETTERS = ("P", "Q")
"""The parities of a group, in the order of its parity nodes."""
TIMEOUT_S = 1.0
"""Seconds until an unanswered request to a vault or the storage is given up."""

VaultRequest = Spill | Protect
Answer = Spilled | Protected | RequestFailed
AnswerCallback = Callable[[Answer], None]


class VaultProcess:
    """One machine's vault. A killed vault never answers, and its successor gets the open requests again."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._world = machine.world
        self._memory = machine.vault_memory
        self._incarnation = 0
        self._is_down = False
        self._open_requests: dict[int, tuple[VaultRequest, AnswerCallback]] = {}
        self._request_number = 0
        self._writes_until = 0.0

    def next_request_number(self) -> int:
        """Return the number of the next request, unique over all incarnations of the agent."""
        self._request_number += 1
        return self._request_number

    def submit(self, message: VaultRequest, on_answer: AnswerCallback) -> None:
        """Begin a request. ``on_answer`` gets the answer if the power stays on."""
        self._open_requests[message.request] = message, on_answer
        if not self._is_down:
            self._begin(message)

    def crash(self) -> None:
        """End by SIGKILL. The memory stays, and a supervisor starts another vault with the open requests."""
        self._incarnation += 1
        self._writes_until, self._is_down = 0.0, True
        incarnation = self._incarnation
        self._world.timeline.after(0.1 + self._rng.random(), lambda: self._restart(incarnation))

    def _restart(self, incarnation: int) -> None:
        if self._incarnation == incarnation:
            self._is_down = False
            for message, _ in list(self._open_requests.values()):
                self._begin(message)

    def lose_power(self) -> None:
        """Forget all requests, since the agent that made them is gone too."""
        self._incarnation += 1
        self._writes_until, self._is_down = 0.0, False
        self._open_requests.clear()

    @property
    def _rng(self) -> Any:
        return self._world.storage_rng

    def _call_later(self, delay_s: float, call: Callable[[], None]) -> None:
        incarnation = self._incarnation

        def fire() -> None:
            if self._incarnation != incarnation:
                return
            if self._machine.is_frozen:
                self._machine.call_when_unfrozen(fire)
            else:
                call()

        self._world.timeline.after(delay_s, fire)

    def _answer(self, answer: Answer) -> None:
        _, on_answer = self._open_requests.pop(answer.request)
        on_answer(answer)

    def _refuse(self, request: VaultRequest, error: EverstepError) -> None:
        delay_s = TIMEOUT_S if isinstance(error, Unavailable) else 0.0
        failed = RequestFailed(request=request.request, code=error.code, message=str(error))
        self._call_later(delay_s, lambda: self._answer(failed))

    def _begin(self, request: VaultRequest) -> None:
        self._call_later(0.005, lambda: self._spill(request) if isinstance(request, Spill) else self._protect(request))

    def _answer_errors(self, request: VaultRequest, work: Callable[[], Any]) -> Any:
        """Return the result of ``work``. If it raises, answer with the error and return None."""
        try:
            return work()
        except EverstepError as error:
            self._refuse(request, error)
            return None

    def _check_generation(self, request: VaultRequest) -> None:
        known = self._memory.generations.get(request.job)
        if known is None:
            raise NotFound(f"job {request.job} is not known here")
        if request.generation < known:
            raise StaleGeneration(f"job {request.job} is in generation {known}, {request.generation} is over")

    def _share(self, job: str, node: str, rank: int, version: Version) -> Slot:
        """Return the rank's share from the vault of ``node``.

        Raises:
            Unavailable: The vault does not answer.
            NotFound: No sealed slot holds the share.
            DigestMismatch: The share is corrupt.
        """
        other = self._machine.world.machines[node]
        is_cut_off = other is not self._machine and not self._world.network.connected(self._machine.name, node)
        if is_cut_off or not other.has_power or other.is_frozen:
            raise Unavailable(f"the vault of {node} does not answer")
        slot = other.vault_memory.find_share(job, rank, version)
        if slot is None:
            raise NotFound(f"no sealed slot on {node} holds version {version} of rank {rank}")
        if slot.corrupt:
            raise DigestMismatch(f"rank {rank}'s version {version} on {node} is not what was sealed")
        return slot

    def _spill(self, request: Spill) -> None:
        """Check all shares on all nodes, then write this node's own shares, one request after another."""

        def read() -> dict[int, Slot]:
            self._check_generation(request)
            writers = [(node, rank) for node, ranks in request.writers.items() for rank in ranks]
            return {rank: self._share(request.job, node, rank, request.version) for node, rank in writers}

        shares = self._answer_errors(request, read)
        if shares is None:
            return
        now, write_s = self._world.timeline.now, 0.1 + 0.5 * self._rng.random() + self._world.storage.extra_write_s
        self._writes_until = max(now, self._writes_until) + write_s
        self._call_later(self._writes_until - now, lambda: self._write(request, shares))

    def _write(self, request: Spill, shares: dict[int, Slot]) -> None:
        storage, own = self._world.storage, request.writers.get(self._machine.name, ())

        def write() -> Spilled:
            for rank in own:
                if self._share(request.job, self._machine.name, rank, request.version) is not shares[rank]:
                    raise NotFound(f"the slot of rank {rank} was filled again meanwhile")
            storage.write(request.url, request.version, {rank: shares[rank].state for rank in own})
            is_complete = storage.mark_complete(request.url, request.version, shares)
            removed = storage.prune(request.url, request.keep_last, request.version) if is_complete else ()
            remaining = tuple(storage.complete_checkpoints(request.url).values()) if is_complete else ()
            if is_complete:
                self._world.observe(CheckpointCompleted(request.job, request.version, removed, remaining))
            folder = folder_name(request.version)
            names = tuple(map(folder_name, remaining)) if request.keep_last else ()
            return Spilled(
                request=request.request,
                folder=folder,
                bytes=100,
                complete=is_complete,
                removed=removed,
                remaining=names,
            )

        answer = self._answer_errors(request, write)
        if answer is not None:
            self._answer(answer)

    def _make_parity(self, request: Protect) -> Parity:
        """Return this node's parity of the group, from the shares of its members."""
        self._check_generation(request)
        group = request.group
        slots = tuple((node, self._share(request.job, node, rank, request.version)) for rank, node in group.members)
        return Parity(request.version, LETTERS[group.parity.index(self._machine.name)], slots)

    def _protect(self, request: Protect) -> None:
        parity = self._answer_errors(request, lambda: self._make_parity(request))
        if parity is not None:
            self._call_later(0.1 + 0.4 * self._rng.random(), lambda: self._seal(request, parity))

    def _seal(self, request: Protect, parity: Parity) -> None:
        def seal() -> Protected:
            current = self._make_parity(request)
            if any(old is not new for (_, old), (_, new) in zip(parity.members, current.members, strict=True)):
                raise NotFound("a member's slot was filled again meanwhile")
            if self._memory.is_full:
                raise Unavailable("there is no memory for parity")
            self._memory.store_parity(request.job, request.group.group, parity, set(request.keep))
            node, group = self._machine.name, request.group.group
            self._world.observe(ParityMade(request.job, node, request.version, group, parity.letter, parity.digest))
            return Protected(request=request.request, parity=parity.letter, members_digest=parity.digest[:64])  # type: ignore[arg-type]

        answer = self._answer_errors(request, seal)
        if answer is not None:
            self._answer(answer)


class VaultClient:
    """Stand in for ``everstep_agent.vault.manager.VaultManager``, for one incarnation of an agent."""

    def __init__(self, machine: Machine, loop: VirtualLoop) -> None:
        self._machine = machine
        self._loop = loop
        self._configured: dict[str, int] = {}

    def configure(self, job: str, generation: int) -> None:
        self._configured[job] = generation
        self._machine.vault_memory.configure(job, generation)

    def forget(self, job: str) -> None:
        self._configured.pop(job, None)
        self._machine.vault_memory.forget(job)

    def is_configured(self, job: str) -> bool:
        return job in self._configured

    def request(self, request: VaultRequest) -> Awaitable[Answer]:
        """Send a request under the next number, and return its answer. No answer comes after the agent's end."""
        future = self._loop.create_future()

        def on_answer(answer: Answer) -> None:
            self._loop.call_when_running(
                lambda: self._loop.enter(lambda: None if future.done() else future.set_result(answer))
            )

        process = self._machine.vault_process
        process.submit(msgspec.structs.replace(request, request=process.next_request_number()), on_answer)
        return future
