"""What of a rank's tracked tensors is not what it was, in words for whoever changed it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from everstep.errors import NotRestorable
from trainer_hooks.snapshot.blob import dtype_name
from trainer_hooks.snapshot.layout import Layout, Part, Tensor
from trainer_hooks.snapshot.live import TrackedTensor

SHOWN = 5
"""Names of each kind."""


def difference(before: Layout, now: Layout) -> str:
    """Tensors that are new, gone, or of another type, shape or part, by name; empty where it is none of these."""
    old, new = _by_name(before), _by_name(now)
    other = [name for name in new if name in old and old[name] != new[name]]
    kinds = {
        "new": [name for name in new if name not in old],
        "gone": [name for name in old if name not in new],
        "changed": [f"{name} ({_said(old[name])}, now {_said(new[name])})" for name in other],
    }
    return "; ".join(f"{kind}: {_listed(names)}" for kind, names in kinds.items() if names)


def _by_name(layout: Layout) -> dict[str, list[Part]]:
    found: dict[str, list[Part]] = {}
    for part in layout.parts:
        found.setdefault(part.name, []).append(part)
    return found


def _said(parts: list[Part]) -> str:
    """Of the first part; of several the number."""
    first = parts[0]
    more = f" in {len(parts)} parts" if len(parts) > 1 else ""
    held = "" if first.box.size == first.shape else f", of it {list(first.box.size)} at {list(first.box.offset)}"
    return f"{first.dtype} {list(first.shape)} {first.sharing}{held}{more}"


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def refuse_other_model(live: list[TrackedTensor], index_of: dict[str, int], catalog: tuple[Tensor, ...]) -> None:
    """Raises NotRestorable, with names, where a live tensor was not stored or is another one than was stored.

    ``index_of``: a name's place in ``catalog``.
    """
    missing = list(dict.fromkeys(t.name for t in live if t.name not in index_of))
    if missing:
        raise NotRestorable(
            f"the tracked state is not what was stored: {len(missing)} tensors are new ({', '.join(missing[:3])}), "
            f"{_not_here(live, index_of)}; restore with the objects that were tracked"
        )
    for tensor in live:
        stored = catalog[index_of[tensor.name]]
        shape = stored.shape[1:] if stored.own else stored.shape
        dtype = dtype_name(tensor.local.dtype)
        if (dtype, tensor.shape) != (stored.dtype, shape):
            raise NotRestorable(
                f"{tensor.name} is {dtype} {list(tensor.shape)} now, and was stored as {stored.dtype} {list(shape)}"
            )


def refuse_other_groups(
    live: Iterable[TrackedTensor],
    index_of: Mapping[str, int],
    catalog: tuple[Tensor, ...],
    groups: Mapping[str, Iterable[tuple[str, int]]],
    optimizers: Collection[str],
) -> None:
    """Raises NotRestorable where one of ``optimizers`` trained a parameter that it does not train now.

    ``groups``: as Tensor.groups, by the names of live parameters. Of an optimizer without state nothing else is missed.
    """
    for tensor in live if optimizers else ():
        now = {top for top, _ in groups.get(tensor.name, ())}
        for top, index in catalog[index_of[tensor.name]].groups:
            if top in optimizers and top not in now:
                raise NotRestorable(
                    f"{top} trained {tensor.name}, in its parameter group {index}, when the version was stored, and "
                    "does not now, so that the options of that group would be lost. What is added in the midst of "
                    "training has to be there before run.track: give an optimizer all parameters from the start, and "
                    "let requires_grad_ say which are trained"
                )


def _not_here(live: list[TrackedTensor], stored: Iterable[str]) -> str:
    """Names that are of no tensor here; of a pipeline's other stages some always are."""
    gone = sorted(set(stored) - {tensor.name for tensor in live})
    return f"{len(gone)} that were stored are not here ({', '.join(gone[:3])})" if gone else "none is gone"
