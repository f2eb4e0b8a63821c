"""One line about the end of a training run, by which two runs can be compared."""

from __future__ import annotations

import torch
import xxhash
from torch.distributed.tensor import DTensor


def print_final(rank: int, step: int, loss: torch.Tensor, model: torch.nn.Module) -> None:
    """Print step, loss, and a digest of the whole parameters in the order of their names, on rank 0; a collective."""
    digest = xxhash.xxh64()
    for _, parameter in sorted(model.named_parameters()):
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        digest.update(whole.detach().cpu().contiguous().numpy().tobytes())
    if rank == 0:
        print(f"final step={step} loss={loss.item():.9g} parameters={digest.hexdigest()}", flush=True)
