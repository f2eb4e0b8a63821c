"""One line about the end of a training run, by which two runs can be compared."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    import torch


def print_final(rank: int, step: int, loss: torch.Tensor, model: torch.nn.Module) -> None:
    """Print step, loss, and a digest of the whole parameters in the order of their names, on rank 0; a collective."""
    print_line(rank, step, loss.item(), digest(model.named_parameters()))


def digest(named: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Return a hash of tensors in the order of their names; of DTensors the whole is hashed, which is a collective."""
    import torch  # not at the top: an example without torch prints the line alone
    from torch.distributed.tensor import DTensor

    hashed = xxhash.xxh64()
    for _, tensor in sorted(named, key=lambda one: one[0]):
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        hashed.update(whole.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()


def print_line(rank: int, step: int, loss: float, parameters: str) -> None:
    """Print the line on rank 0; ``parameters`` is the digest."""
    if rank == 0:
        print(f"final step={step} loss={loss:.9g} parameters={parameters}", flush=True)
