"""Keys of ordinary checkpoints: under which an object may have been saved, and nested state of what is there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from trainer_hooks.module_names import unwrapped
from trainer_hooks.plain_files import Checkpoint, Path


def plain(key: str) -> str:
    """A key as it would be, had the model not been compiled."""
    return unwrapped(key).removeprefix(".")


def joined(path: Path) -> str:
    return plain(".".join(map(str, path)))


def prefixes(top: str, usual: tuple[str, ...] | None) -> Iterator[str]:
    """Under which keys an object may have been saved: its own, those that are usual, and none at all."""
    for key in dict.fromkeys((top, *(usual or ()))):
        yield f"{key}."
        yield f"{key}_state_dict."
    if usual is not None:
        yield ""


def rest(path: Path, prefix: str) -> Path:
    """A path without the parts that make up a flattened key."""
    return next(path[n:] for n in range(1, len(path) + 1) if len(joined(path[:n])) >= len(prefix))


def nested(leaves: Mapping[Path, Any]) -> Any:
    """Nested state from its leaves: integers in paths are indices of lists."""
    if () in leaves:
        return leaves[()]
    heads = dict.fromkeys(path[0] for path in leaves)
    made = {head: nested({p[1:]: v for p, v in leaves.items() if p[0] == head}) for head in heads}
    if made and all(isinstance(head, int) for head in made) and sorted(made) == list(range(len(made))):
        return [made[index] for index in range(len(made))]
    return made


class Keys:
    """Those of one checkpoint, by what they would be, had the model not been compiled."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._stored_as: dict[str, str] = {}
        for key in checkpoint.paths:
            name = plain(key)
            self._stored_as[name] = key if name not in checkpoint.paths else name
        heads = (path[:n] for path in checkpoint.paths.values() for n in range(1, len(path)))
        self.whole = {"", *(f"{joined(head)}." for head in set(heads))}
        """What keys begin with, up to where one dictionary lies in another."""

    def at(self, place: str) -> str:
        """The key itself."""
        return self._stored_as.get(place, place)

    def under(self, prefix: str) -> Any:
        """The nested state under a key, or None where there is nothing."""
        found = [key for name, key in self._stored_as.items() if name.startswith(f"{prefix}.")]
        if not found:
            return None
        return nested({rest(self._checkpoint.paths[key], prefix): self._checkpoint.value(key) for key in found})
