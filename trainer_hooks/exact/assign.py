"""Which virtual ranks a physical rank plays."""

from __future__ import annotations


def virtual_of(rank: int, world_size: int, virtual_ranks: int) -> range:
    """The virtual ranks of ``rank``: neighbours, as many as any other rank's or one more. At least one.

    Raises ValueError for more ranks than virtual ones.
    """
    if virtual_ranks < world_size:
        raise ValueError(
            f"{virtual_ranks} virtual ranks leave some of {world_size} ranks without work: "
            f"take virtual_ranks={world_size} or more (any number, and the same for the whole of a run)"
        )
    return range(rank * virtual_ranks // world_size, (rank + 1) * virtual_ranks // world_size)
