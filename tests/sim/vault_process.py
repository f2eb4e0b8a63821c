"""A machine's vault as its agent asks it: shares to storage, parity of shares. It outlives agents, and can be killed.

What it reads, of its own memory or of other vaults, must be there, sealed and not rotten, at the beginning and at the
end of its work: a share that moved on meanwhile ends it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import msgspec

from everstep.errors import DigestMismatch, EverstepError, NotFound, StaleGeneration, Unavailable
from everstep.ids import Version
from everstep.layout.stored_checkpoints import folder_name
from everstep.wire.v1.local import Protect, Protected, RequestFailed, Spill, Spilled
from tests.sim import facts
from tests.sim.vault_memory import Parity, Slot

if TYPE_CHECKING:
    from tests.sim.event_loop import VirtualLoop
    from tests.sim.machine import Machine

LETTERS = ("P", "Q")
TIMEOUT_S = 1.0
"""Until a vault or a storage that does not answer is given up."""

Ask = Spill | Protect
Answer = Spilled | Protected | RequestFailed
Told = Callable[[Answer], None]


class VaultProcess:
    """One machine's. Answers of a vault that was killed never come; who asked says it again to the next one."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._world = machine.world
        self._memory = machine.vault
        self._life = 0
        self._down = False
        self._asked: dict[int, tuple[Ask, Told]] = {}
        self._number = 0
        self._writes_until = 0.0

    # --- its life ----------------------------------------------------------------------------------------------------

    def next_number(self) -> int:
        """Of a request; requests of all the agents' lives have different ones."""
        self._number += 1
        return self._number

    def ask(self, message: Ask, told: Told) -> None:
        """``told`` hears the answer, if the power stays on."""
        self._asked[message.request] = message, told
        if not self._down:
            self._begin(message)

    def crash(self) -> None:
        """SIGKILL. Its memory stays; the keeper starts another and asks it what was not answered."""
        self._life += 1
        self._writes_until, self._down = 0.0, True
        life = self._life
        self._world.timeline.after(0.1 + self._rng.random(), lambda: self._restarted(life))

    def _restarted(self, life: int) -> None:
        if self._life == life:
            self._down = False
            for message, _ in list(self._asked.values()):
                self._begin(message)

    def lose_power(self) -> None:
        """Whoever asked is gone too."""
        self._life += 1
        self._writes_until, self._down = 0.0, False
        self._asked.clear()

    @property
    def _rng(self) -> Any:
        return self._world.storage_rng

    def _later(self, delay_s: float, call: Callable[[], None]) -> None:
        life = self._life

        def due() -> None:
            if self._life != life:
                return
            if self._machine.frozen:
                self._machine.when_thawed(due)
            else:
                call()

        self._world.timeline.after(delay_s, due)

    def _answer(self, answer: Answer) -> None:
        _, told = self._asked.pop(answer.request)
        told(answer)

    def _refuse(self, ask: Ask, error: EverstepError) -> None:
        delay_s = TIMEOUT_S if isinstance(error, Unavailable) else 0.0
        failed = RequestFailed(request=ask.request, code=error.code, message=str(error))
        self._later(delay_s, lambda: self._answer(failed))

    def _begin(self, ask: Ask) -> None:
        self._later(0.005, lambda: self._spill(ask) if isinstance(ask, Spill) else self._protect(ask))

    def _carry_out(self, ask: Ask, work: Callable[[], Any]) -> Any:
        """What ``work`` returns; None where it raised, which is the answer then."""
        try:
            return work()
        except EverstepError as error:
            self._refuse(ask, error)
            return None

    # --- shares ------------------------------------------------------------------------------------------------------

    def _check_generation(self, ask: Ask) -> None:
        known = self._memory.generations.get(ask.job)
        if known is None:
            raise NotFound(f"job {ask.job} is not known here")
        if ask.generation < known:
            raise StaleGeneration(f"job {ask.job} is in generation {known}, {ask.generation} is over")

    def _share(self, job: str, node: str, rank: int, version: Version) -> Slot:
        """Rank ``rank``'s share as the vault of ``node`` holds it. Raises Unavailable, NotFound, DigestMismatch."""
        other = self._machine.world.machines[node]
        away = other is not self._machine and not self._world.wires.connected(self._machine.name, node)
        if away or not other.power or other.frozen:
            raise Unavailable(f"the vault of {node} does not answer")
        slot = other.vault.held(job, rank, version)
        if slot is None:
            raise NotFound(f"no sealed slot on {node} holds version {version} of rank {rank}")
        if slot.rotten:
            raise DigestMismatch(f"rank {rank}'s version {version} on {node} is not what was sealed")
        return slot

    # --- to storage --------------------------------------------------------------------------------------------------

    def _spill(self, ask: Spill) -> None:
        """All shares are looked at, wherever they are; then this node's own are written, one order after another."""

        def look() -> dict[int, Slot]:
            self._check_generation(ask)
            places = [(node, rank) for node, ranks in ask.writers.items() for rank in ranks]
            return {rank: self._share(ask.job, node, rank, ask.version) for node, rank in places}

        shares = self._carry_out(ask, look)
        if shares is None:
            return
        now, takes_s = self._world.timeline.now, 0.1 + 0.5 * self._rng.random() + self._world.storage.slow_s
        self._writes_until = max(now, self._writes_until) + takes_s
        self._later(self._writes_until - now, lambda: self._write(ask, shares))

    def _write(self, ask: Spill, shares: dict[int, Slot]) -> None:
        storage, own = self._world.storage, ask.writers.get(self._machine.name, ())

        def write() -> Spilled:
            for rank in own:
                if self._share(ask.job, self._machine.name, rank, ask.version) is not shares[rank]:
                    raise NotFound(f"the slot of rank {rank} was filled anew meanwhile")
            storage.write(ask.url, ask.version, {rank: shares[rank].state for rank in own})
            whole = storage.complete(ask.url, ask.version, shares)
            removed = storage.prune(ask.url, ask.keep_last, ask.version) if whole else ()
            left = tuple(storage.whole(ask.url).values()) if whole else ()
            if whole:
                self._world.see(facts.StoredWhole(ask.job, ask.version, removed, left))
            folder = folder_name(ask.version)
            names = tuple(map(folder_name, left)) if ask.keep_last else ()
            return Spilled(
                request=ask.request, folder=folder, bytes=100, complete=whole, removed=removed, remaining=names
            )

        answer = self._carry_out(ask, write)
        if answer is not None:
            self._answer(answer)

    # --- parity ------------------------------------------------------------------------------------------------------

    def _members(self, ask: Protect) -> Parity:
        self._check_generation(ask)
        group = ask.group
        slots = tuple((node, self._share(ask.job, node, rank, ask.version)) for rank, node in group.members)
        return Parity(ask.version, LETTERS[group.parity.index(self._machine.name)], slots)

    def _protect(self, ask: Protect) -> None:
        made = self._carry_out(ask, lambda: self._members(ask))
        if made is not None:
            self._later(0.1 + 0.4 * self._rng.random(), lambda: self._seal(ask, made))

    def _seal(self, ask: Protect, made: Parity) -> None:
        def seal() -> Protected:
            again = self._members(ask)
            if any(one is not other for (_, one), (_, other) in zip(made.members, again.members, strict=True)):
                raise NotFound("a member's slot was filled anew meanwhile")
            if self._memory.full:
                raise Unavailable("there is no memory for parity")
            self._memory.keep_parity(ask.job, ask.group.group, made, set(ask.keep))
            self._world.see(
                facts.ParityMade(ask.job, self._machine.name, ask.version, ask.group.group, made.letter, made.digest)
            )
            return Protected(request=ask.request, parity=made.letter, members_digest=made.digest[:64])  # type: ignore[arg-type]

        answer = self._carry_out(ask, seal)
        if answer is not None:
            self._answer(answer)


class VaultLink:
    """``everstep_agent.vault.manager.VaultManager`` for one life of an agent, as far as orders need it."""

    def __init__(self, machine: Machine, loop: VirtualLoop) -> None:
        self._machine = machine
        self._loop = loop
        self._told: dict[str, int] = {}

    def configure(self, job: str, generation: int) -> None:
        self._told[job] = generation
        self._machine.vault.configure(job, generation)

    def forget(self, job: str) -> None:
        self._told.pop(job, None)
        self._machine.vault.forget(job)

    def is_configured(self, job: str) -> bool:
        return job in self._told

    def request(self, ask: Ask) -> Awaitable[Answer]:
        """The answer to a request, asked under the next number; nobody gets one after the agent has ended."""
        future = self._loop.create_future()

        def told(answer: Answer) -> None:
            self._loop.do(lambda: self._loop.enter(lambda: None if future.done() else future.set_result(answer)))

        process = self._machine.vault_process
        process.ask(msgspec.structs.replace(ask, request=process.next_number()), told)
        return future
