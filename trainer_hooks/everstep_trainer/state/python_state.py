"""Store and merge the Python state of tracked objects: everything but the tensors of modules and optimizers.

Every rank stores its own. State of a parameter or a module is stored under its full name, so that a rank of another
layout can take it from any rank that had it: a pipeline rank knows only its stage's parameters, and may have others in
the next generation. Other state (a schedule, a sampler) comes from a rank of the same stage.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import torch

from everstep.errors import MalformedMessage, NotRestorable
from everstep_trainer.state.python_value_codec import Blob, DeviceNumber, decode_blob, encode_blob

# ---- schedules: lists with one entry per parameter group of their optimizer, in order
#
# A rank with other layers may have other groups, or fewer: a pipeline stage without biases has no group for them. So
# entries are taken from the groups that held the parameters.

PER_GROUP = frozenset({"base_lrs", "_last_lr", "min_lrs", "max_lrs", "base_momentums", "max_momentums", "lr_lambdas"})
"""The keys of such lists in torch's ``state_dict()`` of schedules."""

GroupPosition = tuple[int, int]  # index of one of several stored states, and index of one of its groups


def merge_schedules(states: Sequence[Any], positions: Sequence[GroupPosition]) -> Any:
    """Return the first of one schedule's states, with the entries of the groups at ``positions``."""
    first = states[0]
    if isinstance(first, dict):
        return {key: _entry(key, [of[key] for of in states if key in of], positions, len(states)) for key in first}
    if isinstance(first, list) and all(isinstance(of, list) and len(of) == len(first) for of in states):
        return [merge_schedules(of, positions) for of in zip(*states, strict=True)]  # schedules in a schedule
    return first


def _entry(key: Any, values: Sequence[Any], places: Sequence[GroupPosition], count: int) -> Any:
    if len(values) < count:
        return values[0]
    if key not in PER_GROUP:
        return merge_schedules(values, places)
    if all(isinstance(values[of], list) and at < len(values[of]) for of, at in places):
        return [values[of][at] for of, at in places]
    return values[0]


# ---- per-rank state: objects whose state belongs to one rank, such as its position in its own file

FIELDS = frozenset({"rank", "world_size", "state"})  # the fields stored for such an object


class PerRankState:
    """Wraps a tracked object so that its state returns only to the rank that stored it, at the same world size."""

    def __init__(self, tracked: Any, rank: int, world_size: int, *, label: str, fix: str, noun: str = "rank") -> None:
        self._tracked, self._rank, self._world = tracked, rank, world_size
        self._label, self._fix, self._noun = label, fix, noun

    def state_dict(self) -> dict[str, Any]:
        return {"rank": self._rank, "world_size": self._world, "state": self._tracked.state_dict()}

    def load_state_dict(self, stored: Any) -> None:
        """Load the state. Raises NotRestorable for the state of another rank or another number of ranks."""
        if not isinstance(stored, Mapping) or stored.keys() != FIELDS:
            raise NotRestorable(f"the stored state of {self._label} does not name its rank. {self._fix}")
        if stored["world_size"] != self._world:
            raise NotRestorable(
                f"{self._label} was stored on {stored['world_size']} {self._noun}s, and there are {self._world} "
                f"now: its state cannot be split again. {self._fix}"
            )
        if stored["rank"] != self._rank:
            raise NotRestorable(
                f"{self._label} of {self._noun} {self._rank} was lost with its process, and the state of "
                f"{self._noun} {stored['rank']} cannot replace it. {self._fix}"
            )
        self._tracked.load_state_dict(stored["state"])


def wrap_per_rank(objects: Mapping[str, object], names: Sequence[str], rank: int, world_size: int) -> dict[str, object]:
    """Return the objects, those in ``names`` wrapped as per-rank. Raises TypeError or ValueError for unfit ones."""
    if isinstance(names, str):
        raise TypeError(f"per_rank takes a list of names: per_rank=[{names!r}]")
    for name in names:
        if name not in objects:
            raise ValueError(f"per_rank names {name}, which is not tracked")
        if isinstance(objects[name], torch.nn.Module | torch.optim.Optimizer | list | tuple):
            raise TypeError(f"per_rank names {name}: modules and optimizers are stored by their tensors' layout")
        if not hasattr(objects[name], "state_dict") or not hasattr(objects[name], "load_state_dict"):
            kind = type(objects[name]).__qualname__
            raise TypeError(f"{name} is a {kind}, which has no state_dict and load_state_dict")
    return {
        key: PerRankState(tracked, rank, world_size, label=key, fix=_fix_hint(key)) if key in names else tracked
        for key, tracked in objects.items()
    }


def rank_markers(objects: Mapping[str, object]) -> dict[str, torch.Tensor]:
    """Return a tensor per per-rank object, by name, so that a version is incomplete if this rank's slot is lost."""
    return {f"{key}.of_rank": torch.zeros(1) for key, tracked in objects.items() if isinstance(tracked, PerRankState)}


def _fix_hint(key: str) -> str:
    return (
        f"Derive it from the step, keep the number of ranks (everstep-launch --nnodes N:N), or leave {key} out of "
        "per_rank if any rank's state will do"
    )


FORMAT = 2

StateName = tuple[str, str]
"""(object's key, parameter's full name); ("", name) is a module with extra state, (key, "") another object."""

_ON_GPU = {"scale": "_scale", "_growth_tracker": "_growth_tracker"}
"""Tensors in a gradient scaler's state: key in its state_dict, attribute that holds it."""
_STRUCTURE = frozenset({"params", "param_names"})  # keys that name a parameter group's parameters, as the layout does


MAX_NAMES_BYTES = 64 << 20


class ParameterGroup(msgspec.Struct, frozen=True):
    """A parameter group: the packed full names of its parameters (``pack_names``), and its hyper-parameters."""

    packed: bytes
    options: dict[str, Any]

    @property
    def members(self) -> tuple[str, ...]:
        return unpack_names(self.packed)


def pack_names(names: Iterable[str]) -> bytes:
    """Compress names: they are written with every snapshot, and change only with the objects."""
    return zlib.compress("\0".join(names).encode(), 1)


def unpack_names(data: bytes) -> tuple[str, ...]:
    """Decompress names. Raises MalformedMessage, also if they would exceed MAX_NAMES_BYTES."""
    try:
        reader = zlib.decompressobj()
        text = reader.decompress(data, MAX_NAMES_BYTES).decode()
    except (zlib.error, UnicodeDecodeError) as error:
        raise MalformedMessage(f"the names of a parameter group cannot be read: {error}") from error
    if not reader.eof:
        raise MalformedMessage(f"the names of a parameter group are cut short, or take over {MAX_NAMES_BYTES} bytes")
    return tuple(text.split("\0")) if text else ()


class PythonState(msgspec.Struct, frozen=True):
    """The Python state of one rank."""

    groups: dict[str, list[ParameterGroup]]  # by the optimizer's key
    scalars: dict[str, dict[str, dict[str, Any]]]  # optimizer state that is no tensor, by optimizer and parameter
    extra: dict[str, Any]  # extra state of modules, by full name
    objects: dict[str, Any]  # state of all other objects, by key

    @property
    def names(self) -> frozenset[StateName]:
        members = ((top, fqn) for top, groups in self.groups.items() for group in groups for fqn in group.members)
        return frozenset((*members, *(("", name) for name in self.extra), *((key, "") for key in self.objects)))


def encode(state: PythonState) -> Blob:
    """Encode the state. Raises TypeError with an unstorable value's path, ConfigurationError for too much state."""
    groups = {top: [[g.packed, g.options] for g in groups] for top, groups in state.groups.items()}
    return Blob({"format": FORMAT} | msgspec.structs.asdict(state) | {"groups": groups})


def decode(data: bytes | memoryview) -> PythonState:
    """Decode the state. Raises MalformedMessage."""
    blob = decode_blob(data)
    if not isinstance(blob, dict) or blob.get("format") != FORMAT:
        raise MalformedMessage(
            f"a slot's Python state is not of format {FORMAT}, which this release reads: "
            "continue with the release that stored it, or start the job from scratch"
        )
    try:
        groups = {top: [ParameterGroup(*group) for group in groups] for top, groups in blob["groups"].items()}
        state = PythonState(groups, blob["scalars"], blob["extra"], blob["objects"])
        state.names  # noqa: B018 - unpacked once, so that a damaged one is found here
        return state
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise MalformedMessage(f"a slot's Python state cannot be read: {error}") from error


def get_state_dict(tracked: Any) -> Any:
    """Return ``tracked.state_dict()``; for a gradient scaler on a GPU, without waiting to read its two numbers."""
    if not isinstance(tracked, torch.amp.GradScaler):
        return tracked.state_dict()
    held: dict[str, Any] = {key: getattr(tracked, name, None) for key, name in _ON_GPU.items()}
    live = {key: DeviceNumber(value) for key, value in held.items() if getattr(value, "is_cuda", False)}
    if len(live) < len(held):
        return tracked.state_dict()
    # a copy without tensors reports its initial numbers instead of reading the GPU
    unused = object.__new__(type(tracked))
    unused.__dict__.update(tracked.__dict__ | dict.fromkeys(_ON_GPU.values()))
    state = unused.state_dict()
    return state | {key: number for key, number in live.items() if key in state}


def group_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hyper-parameters of an optimizer's parameter group."""
    return {key: value for key, value in group.items() if key not in _STRUCTURE}


class MergedState:
    """Several ranks' states of one version, nearest first, merged for one rank: the first that knows a name counts.
    States with exactly this rank's ``names`` are of the same stage, and take precedence."""

    def __init__(self, states: Sequence[PythonState], names: frozenset[StateName]) -> None:
        ordered = sorted(states, key=lambda state: state.names != names)
        self._states = ordered
        self.extra: dict[str, Any] = {}
        self.objects: dict[str, Any] = {}
        self._groups: dict[str, list[ParameterGroup]] = defaultdict(list)
        self._scalars: dict[StateName, dict[str, Any]] = {}
        self._group_of: dict[StateName, dict[str, Any]] = {}
        self._by_index: dict[tuple[str, int], dict[str, Any]] = {}
        for state in reversed(ordered):
            self.extra.update(state.extra)
            self.objects.update(state.objects)
            self._scalars |= {(top, fqn): s for top, of in state.scalars.items() for fqn, s in of.items()}
            for top, groups in state.groups.items():
                self._groups[top] += groups
                self._by_index |= {(top, index): group.options for index, group in enumerate(groups)}
                self._group_of |= {(top, fqn): group.options for group in groups for fqn in group.members}

    def has_parameter(self, top: str, fqn: str) -> bool:
        """Return whether an optimizer trained a parameter of this name."""
        return (top, fqn) in self._group_of

    def scalars(self, top: str, fqn: str) -> dict[str, Any]:
        """Return an optimizer's state of a parameter that is no tensor."""
        return self._scalars.get((top, fqn), {})

    def members(self, top: str) -> list[tuple[str, ...]]:
        """Return the parameters of each group that the optimizer had on any of the ranks, in their order."""
        return [group.members for group in self._groups[top]]

    def options(self, top: str, index: int, members: Sequence[str]) -> dict[str, Any]:
        """Return the options of group ``index``, now with these parameters. Raises NotRestorable if they differ."""
        if not members:
            return self._by_index.get((top, index), {})
        if new := [fqn for fqn in members if (top, fqn) not in self._group_of]:
            raise NotRestorable(
                f"{top} trains {len(new)} parameters ({', '.join(new[:3])}) that it did not train when the version was "
                "stored: restore with the objects that were tracked"
            )
        first = self._group_of[top, members[0]]
        for fqn in members:
            other = self._group_of[top, fqn]
            if other is not first and encode_blob(other) != encode_blob(first):
                raise NotRestorable(
                    f"{members[0]} and {fqn} are in one parameter group of {top} now, but were stored in groups with "
                    f"different hyper-parameters ({describe_difference(first, other)}): keep them in separate groups"
                )
        return first

    def schedule(self, key: str, top: str, members: Sequence[Sequence[str]]) -> Any:
        """Return the state of the schedule tracked under ``key``, for an optimizer with groups of these parameters."""
        states = [state for state in self._states if key in state.objects]
        places: dict[str, GroupPosition] = {}
        for number, state in enumerate(states):
            for index, group in enumerate(state.groups.get(top, ())):
                for fqn in group.members:
                    places.setdefault(fqn, (number, index))
        wanted = [places.get(of[0]) if of else (0, index) for index, of in enumerate(members)]
        found = [place for place in wanted if place is not None]
        as_stored = [(0, index) for index in range(len(states[0].groups.get(top, ())))]
        if found == as_stored or len(found) < len(wanted):
            return self.objects[key]
        return merge_schedules([state.objects[key] for state in states], found)

    def require(self, names: Iterable[StateName]) -> None:
        """Raise NotRestorable if an object or a module's extra state was not stored."""
        for top, fqn in names:
            if not fqn and top not in self.objects:
                raise NotRestorable(f"{top} is tracked now, but was not when the version was stored")


def describe_difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Return the differences in words; empty if there are none."""
    keys = sorted(k for k in one.keys() | other.keys() if encode_blob(one.get(k)) != encode_blob(other.get(k)))
    return ", ".join(f"{key} {one.get(key)!r} and {other.get(key)!r}" for key in keys)


def load_options(group: dict[str, Any], stored: Mapping[str, Any]) -> None:
    """Load stored hyper-parameters into a live parameter group."""
    for key, value in stored.items():
        present = group.get(key)
        if isinstance(present, torch.Tensor) and isinstance(value, torch.Tensor):
            present.copy_(value)  # schedulers keep a reference to the tensor itself
        else:
            group[key] = value
