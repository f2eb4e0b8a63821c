"""Choose the version to start from: a pure function of the rule and of the vaults' slots."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import msgspec
from msgspec.structs import replace

from everstep.errors import MalformedMessage, NotRestorable
from everstep.ids import Version
from everstep.layout.manifests import Box, Manifest, TensorInfo, full_box, uncovered
from everstep.wire.v1.local import SlotInfo
from everstep.wire.v1.training import RestoreRule

FIRST_CHECKPOINT_RANK = 1 << 19
"""Rank numbers from here on belong to DCP checkpoints of a job (memory_tier/dcp), not to its ranks."""

MAX_REPEATED_STEPS = 8
"""Steps that are computed again at most so that a rank does again what it does at the end of a step."""

ManifestOf = Callable[[str], Manifest]
"""Returns the manifest of a digest. Raises MalformedMessage if it is missing or unreadable."""


class VersionChoice(msgspec.Struct, frozen=True):
    """A chosen version (None: start from scratch), the slots that hold it, and why it was chosen."""

    version: Version | None
    slots: tuple[SlotInfo, ...]
    sentence: str
    unfinished: str = ""  # why the step of the newest complete version should be computed again
    repeats: bool = False  # an earlier version was chosen for that


def only_snapshots(slots: Iterable[SlotInfo]) -> tuple[SlotInfo, ...]:
    """Return the slots that are no DCP checkpoints."""
    return tuple(slot for slot in slots if slot.rank < FIRST_CHECKPOINT_RANK)


def is_usable(rule: RestoreRule, version: Version) -> bool:
    """Return whether the rule allows this version, or allows to repeat the steps from it to the committed version."""
    return is_admitted(rule, version) or _precedes_floor(rule, version)


def _precedes_floor(rule: RestoreRule, version: Version) -> bool:
    """Return whether the committed version follows this one by few steps of the same generation."""
    if rule.from_scratch or rule.floor is None or version.generation != rule.floor.generation:
        return False
    return 0 < rule.floor.step - version.step <= MAX_REPEATED_STEPS


def is_admitted(rule: RestoreRule, version: Version) -> bool:
    """Return whether the rule allows this version; a version kept by parity is allowed for lack of a newer one."""
    below = rule.floor is not None and version < rule.floor
    if rule.from_scratch or (below and not (rule.protection is not None and version == rule.protection.version)):
        return False
    return rule.ceiling is None or version <= rule.ceiling


def choose_version(rule: RestoreRule, slots: Sequence[SlotInfo], manifest_of: ManifestOf) -> VersionChoice:
    """Return the newest admitted version whose slots cover every tensor; scratch if none is complete, and nothing was
    ever committed or the rule names a checkpoint on storage. Raises NotRestorable, saying what each version lacks."""
    if rule.from_scratch:
        return VersionChoice(None, (), "the generation starts from scratch")
    usable: dict[Version, list[SlotInfo]] = defaultdict(list)
    for slot in slots:
        if is_usable(rule, slot.version):
            usable[slot.version].append(slot)
    gaps: list[str] = []
    unfinished: VersionChoice | None = None
    ended = ""  # why no step would be left after the version of ``unfinished``
    for version, holders in sorted(usable.items(), reverse=True):
        if unfinished is not None and not _may_repeat(version, unfinished):
            break
        if not (ended or is_admitted(rule, version)):
            continue
        gap = describe_missing(holders, manifest_of)
        behind = "" if gap or version == rule.floor else describe_unfinished(version, slots)
        if not gap and not behind and unfinished is None:
            behind = ended = describe_loop_end(version, slots)
        if not gap and not behind:
            choice = _chosen(rule, version, holders, gaps)
            return replace(choice, unfinished=unfinished.unfinished, repeats=True) if unfinished else choice
        if behind and unfinished is None:
            unfinished = replace(_chosen(rule, version, holders, gaps), unfinished=behind)
        gaps.append(f"{version}: {gap or behind}")
    if unfinished is not None:  # the work after the loop is made again from the last version as well
        return replace(unfinished, unfinished="") if ended else unfinished
    if rule.floor is None:
        sentence = f"no version is complete, and none was committed: from scratch ({'; '.join(gaps)})"
        return VersionChoice(None, (), sentence)
    ceiling = f" and not newer than {rule.ceiling}" if rule.ceiling is not None else ""
    lost = (
        f"version {rule.floor} was committed, but no version from it on{ceiling} is complete: "
        f"{'; '.join(gaps) or 'no reachable vault holds a slot of such a version'}"
    )
    if rule.storage_url:
        return VersionChoice(None, (), f"{lost}; the job restores {rule.storage_url}")
    raise NotRestorable(lost)


def _chosen(rule: RestoreRule, version: Version, holders: Sequence[SlotInfo], gaps: Sequence[str]) -> VersionChoice:
    newer = f"; not {' and not '.join(gaps)}" if gaps else ""
    ordered = sorted(holders, key=lambda slot: (slot.rank, slot.node, slot.replica, slot.path, slot.slot))
    reason = f"{version} is the newest complete version"
    if rule.floor is not None and version < rule.floor:
        reason = f"{rule.floor} was committed but is lost; {version}, protected by parity, is complete"
    return VersionChoice(version, tuple(ordered), f"{reason}{newer}")


def describe_unfinished(version: Version, slots: Sequence[SlotInfo]) -> str:
    """Return which ranks had updated the state to ``version`` but had not come to the end of its step, in words.

    Such a rank may have died, or may have been interrupted, in what the script does at the end of a step, such as a
    save. The other ranks may have stored the version without it. Empty if there is no such rank.
    """
    behind = sorted(
        {
            (slot.finished_by, slot.node)
            for slot in slots
            if slot.finished is not None
            and slot.finished.generation == version.generation
            and slot.finished.step < version.step
        }
    )
    if not behind:
        return ""
    rank, node = behind[0]
    more = f" and {len(behind) - 1} more" if len(behind) > 1 else ""
    return f"rank {rank} on {node}{more} had not come to the end of step {version.step}"


def describe_loop_end(version: Version, slots: Sequence[SlotInfo]) -> str:
    """Return that the loop of a rank had ended with the step of ``version``, in words; empty if none had.

    From that version no step is left, so that what the function does after its loop would find no value of the loop.
    """
    mark = Version(version.generation, version.step)
    if not any(slot.loop_ended and slot.finished == mark for slot in slots):
        return ""
    return f"step {version.step} was the last one, and what follows the loop may need what the step computes"


def _may_repeat(version: Version, unfinished: VersionChoice) -> bool:
    """Return whether few enough steps lie between the versions to compute them again for the end of one step."""
    newer = unfinished.version
    return newer is not None and newer.step - version.step <= MAX_REPEATED_STEPS


def describe_missing(holders: Sequence[SlotInfo], manifest_of: ManifestOf) -> str:
    """Return what these slots of one version lack, in words; empty if they are complete."""
    manifests, unreadable = _readable(holders, manifest_of)
    if not manifests:
        return f"none of {len(holders)} manifests can be read: {unreadable}"
    catalog = manifests[0].catalog
    boxes: list[set[Box]] = [set() for _ in catalog]
    for manifest in manifests:
        if manifest.catalog != catalog:
            return "its slots are of different models"
        for stored in manifest.stored:
            boxes[stored.tensor].add(stored.box)
    lacking = [t.name for t, held in zip(catalog, boxes, strict=True) if not is_fully_covered(t, held)]
    if not lacking:
        return ""
    ranks = sorted({m.rank for m in manifests})
    return (
        f"{len(lacking)} of {len(catalog)} tensors are incomplete, such as {lacking[0]}; "
        f"only slots of ranks {ranks} of {manifests[0].world_size} were found"
    )


def _readable(holders: Sequence[SlotInfo], manifest_of: ManifestOf) -> tuple[list[Manifest], str]:
    manifests, error = [], ""
    for digest in sorted({slot.manifest_digest for slot in holders}):
        try:
            manifests.append(manifest_of(digest))
        except MalformedMessage as problem:
            error = str(problem)
    return manifests, error


def is_fully_covered(tensor: TensorInfo, stored_boxes: set[Box]) -> bool:
    """Return whether the boxes make up the tensor; for a per-rank tensor, the parts of all ranks that have it."""
    wanted = [full_box(tensor.shape)]
    if tensor.ranks:
        inner = (0,) * len(tensor.shape[1:])
        wanted = [Box((rank, *inner), (1, *tensor.shape[1:])) for rank in tensor.ranks]
    return all(box in stored_boxes or not uncovered(box, sorted(stored_boxes)) for box in wanted)
