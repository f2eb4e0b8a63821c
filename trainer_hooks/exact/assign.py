"""Which virtual ranks a physical rank plays."""

from __future__ import annotations


def virtual_of(rank: int, world_size: int, virtual_ranks: int) -> range:
    """The virtual ranks of ``rank``: neighbours, as many as any other rank's or one more. At least one.

    What neighbours have can be added before it is sent. Raises ValueError for more ranks than virtual ones.
    """
    _require_work(world_size, virtual_ranks)
    return range(rank * virtual_ranks // world_size, (rank + 1) * virtual_ranks // world_size)


def virtual_in_turn(rank: int, world_size: int, virtual_ranks: int) -> range:
    """The same, dealt out one after another: what all ranks have of their n-th ones are neighbours.

    So what they send as they go can be added at once, and is not held until the last one is there.
    """
    _require_work(world_size, virtual_ranks)
    return range(rank, virtual_ranks, world_size)


def _require_work(world_size: int, virtual_ranks: int) -> None:
    if virtual_ranks < world_size:
        raise ValueError(
            f"{virtual_ranks} virtual ranks leave some of {world_size} ranks without work: "
            f"take virtual_ranks={world_size} or more (any number, and the same for the whole of a run)"
        )
