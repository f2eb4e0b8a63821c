"""How the ranks of a generation agree on a version, through its store: inventories, a choice, outcomes, a verdict.

The first rank of each node tells what its vault holds. Rank 0 chooses. Every rank reads what it needs and says how
that went; only when all have what they need do they go on, else rank 0 chooses again without what proved bad.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

import msgspec
from torch._C._distributed_c10d import Store
from torch.distributed import DistStoreError

from everstep.clock import Clock
from everstep.errors import MalformedMessage, NotRestorable, Unavailable
from everstep.ids import Version
from everstep.wire.v1.local import SlotInfo
from everstep.wire.v1.training import GenerationSpec, Member, RestoreRule
from trainer_hooks.restore.choose import Choice, admitted, choose
from trainer_hooks.snapshot.exchange import poll
from trainer_hooks.snapshot.layout import Manifest, content_digest, decode_manifest
from trainer_hooks.store_messages import decode, put, wait_for

PATIENCE_S = 60.0


class SlotKey(msgspec.Struct, frozen=True):
    """Which slot, among all of the job."""

    node: str
    rank: int
    version: Version
    replica: bool
    parity: bool = False


def slot_key(slot: SlotInfo) -> SlotKey:
    return SlotKey(slot.node, slot.rank, slot.version, slot.replica, slot.group is not None)


class Inventory(msgspec.Struct, frozen=True):
    """The slots of one node's vault."""

    slots: tuple[SlotInfo, ...]


class Proposal(msgspec.Struct, frozen=True):
    """Rank 0's choice, or why there is none. ``newest`` is the newest version of which anything was found, or that was
    committed."""

    choice: Choice | None
    newest: Version | None
    error: str = ""

    @property
    def takes_newest(self) -> bool:
        return self.choice is not None and self.choice.version is not None and self.choice.version == self.newest

    @property
    def takes_nothing(self) -> bool:
        return self.choice is None or self.choice.version is None


class Outcome(msgspec.Struct, frozen=True):
    """How reading went for one rank: whether it has all it needs, and which slots proved bad.

    ``lives``: a bit for each tensor of the catalog that this rank has live, lowest first; empty when it has all of
    them. ``error``: no other choice would help.
    """

    ok: bool
    bad: tuple[SlotKey, ...] = ()
    lives: bytes = b""
    error: str = ""


class Verdict(msgspec.Struct, frozen=True):
    """What the outcomes come to: whether all ranks have what they need, all slots that proved bad, and what speaks
    against any choice."""

    ok: bool
    bad: tuple[SlotKey, ...] = ()
    error: str = ""


class Council:
    """One rank's voice in a restore. The same code on all ranks; rank 0 also chairs.

    What is there may be told, gathered and proposed by a thread beside the training thread; the rest is for the latter.
    """

    def __init__(self, store: Store, spec: GenerationSpec, member: Member, clock: Clock) -> None:
        self._store = store
        self._spec = spec
        self._member = member
        self._clock = clock
        self._told: tuple[SlotInfo, ...] = ()
        self._bodies: dict[str, bytes] = {}
        self._manifests: dict[str, Manifest] = {}

    @property
    def rule(self) -> RestoreRule:
        return self._spec.restore

    @property
    def chairs(self) -> bool:
        return self._member.rank == 0

    @property
    def speaks_for_node(self) -> bool:
        """Whether this rank tells what its node's vault holds: the first of the node does."""
        return self._member.local_rank == 0

    # --- what is there

    def tell(self, slots: tuple[SlotInfo, ...], manifests: dict[str, bytes]) -> None:
        """Publishes what this node's vault holds, with the manifests of it. Only what the rule admits is of use."""
        for digest, body in manifests.items():
            self.learn(digest, body)
            self.add_manifest(digest, body)
        self._told = tuple(s for s in slots if admitted(self.rule, s.version))
        put(self._store, f"restore/inventory/{self._member.node}", Inventory(self._told))

    def add_manifest(self, digest: str, body: bytes) -> None:
        """Publishes one manifest by its digest."""
        self._store.set(f"restore/manifest/{digest}", body)  # type: ignore[arg-type]  # takes bytes

    def learn(self, digest: str, body: bytes) -> None:
        """Takes a manifest that was read where it lies; one that is not the digest's is not believed."""
        if content_digest(body) == digest:
            self._bodies[digest] = body

    def knows_manifest(self, digest: str) -> bool:
        """Whether it need not be asked for."""
        return digest in self._bodies

    def has_manifest(self, digest: str) -> bool:
        """Whether this rank knows it, or somebody published it."""
        return self.knows_manifest(digest) or self._store.check([f"restore/manifest/{digest}"])

    def gather(self, stop: threading.Event) -> tuple[SlotInfo, ...]:
        """What all nodes of the roster told, for the speaker of one of them.

        Raises DistStoreError when a node stays silent for PATIENCE_S, or ``stop`` was set.
        """
        nodes = [node for node in self._spec.seats if node != self._member.node]
        keys = [f"restore/inventory/{node}" for node in nodes]
        try:
            told = poll(self._store, keys, stop=stop, clock=self._clock, timeout_s=PATIENCE_S)
        except Unavailable as error:
            raise DistStoreError(str(error)) from error
        return self._told + tuple(slot for body in told for slot in decode(body, Inventory).slots)

    def manifest(self, digest: str) -> Manifest:
        """One that was learnt or published. Raises MalformedMessage where nobody could read it, or it is damaged."""
        if digest not in self._manifests:
            if not self.has_manifest(digest):
                raise MalformedMessage(f"manifest {digest} could not be read where it lies")
            if not self.knows_manifest(digest):
                self.learn(digest, self._store.get(f"restore/manifest/{digest}"))
            if not self.knows_manifest(digest):
                raise MalformedMessage(f"manifest {digest} is not what was sealed")
            self._manifests[digest] = decode_manifest(self._bodies[digest])
        return self._manifests[digest]

    # --- choosing

    def decide(self, slots: tuple[SlotInfo, ...]) -> Proposal:
        """What rank 0 makes of these slots."""
        floor = [] if self.rule.floor is None or self.rule.scratch else [self.rule.floor]
        newest = max((*floor, *(s.version for s in slots if admitted(self.rule, s.version))), default=None)
        try:
            return Proposal(choose(self.rule, slots, self.manifest), newest)
        except NotRestorable as error:
            return Proposal(None, newest, str(error))

    def propose(self, number: int, proposal: Proposal) -> None:
        """Rank 0: publishes choice ``number``."""
        put(self._store, f"restore/choice/{number}", proposal)

    def choice(self, number: int) -> Choice:
        """The published choice, checked against the rule. Raises NotRestorable with the sentence of what is missing."""
        (body,) = self._get([f"restore/choice/{number}"])
        made = decode(body, Proposal)
        if made.choice is None:
            raise NotRestorable(made.error)
        version = made.choice.version
        if version is not None and not admitted(self.rule, version):
            raise NotRestorable(f"rank 0 chose {version}, which the generation's rule does not admit")
        return made.choice

    def settle(self, number: int, outcome: Outcome, names: Sequence[str] = ()) -> Verdict:
        """Tells this rank's outcome of choice ``number``, and hears what all of them come to.

        ``names``: of the version's tensors. No rank need have all of them live (a stage of a pipeline does not), but
        each must be live on some rank. Raises NotRestorable, on all ranks alike, where no choice would help.
        """
        put(self._store, f"restore/outcome/{number}/{self._member.rank}", outcome)
        if self.chairs:
            keys = [f"restore/outcome/{number}/{rank}" for rank in range(self._spec.world_size)]
            verdict = judge([decode(body, Outcome) for body in self._get(keys)], names)
            put(self._store, f"restore/verdict/{number}", verdict)
        else:
            (body,) = self._get([f"restore/verdict/{number}"])
            verdict = decode(body, Verdict)
        if verdict.error:
            raise NotRestorable(verdict.error)
        return verdict

    def _get(self, keys: list[str]) -> list[bytes]:
        return wait_for(self._store, keys, self._clock, PATIENCE_S)


def lives_of(indices: Iterable[int], count: int) -> bytes:
    """Which of ``count`` tensors are live, as Outcome has it."""
    distinct = set(indices)
    if len(distinct) == count:
        return b""
    bits = bytearray(-(-count // 8))
    for index in distinct:
        bits[index >> 3] |= 1 << (index & 7)
    return bytes(bits)


def judge(outcomes: Sequence[Outcome], names: Sequence[str]) -> Verdict:
    """What all ranks' outcomes come to; see Council.settle."""
    bad = tuple(dict.fromkeys(key for outcome in outcomes for key in outcome.bad))
    errors = [outcome.error for outcome in outcomes if outcome.error]
    ok = all(outcome.ok for outcome in outcomes)
    gone: list[str] = []
    if ok and all(outcome.lives for outcome in outcomes):
        anywhere = 0
        for outcome in outcomes:
            anywhere |= int.from_bytes(outcome.lives, "little")
        bits = anywhere.to_bytes(max(len(outcome.lives) for outcome in outcomes), "little")
        gone = [name for index, name in enumerate(names) if not bits[index >> 3] >> (index & 7) & 1]
    if gone:
        errors.append(
            f"the tracked state is not what was stored: {len(gone)} tensors are gone from all ranks "
            f"({', '.join(sorted(gone)[:3])}); restore with the objects that were tracked. What is added in the midst "
            "of training has to be there before run.track: give an optimizer all parameters from the start, and let "
            "requires_grad_ say which are trained"
        )
    return Verdict(ok, bad, errors[0] if errors else "")
