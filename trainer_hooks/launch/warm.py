"""What a standby does while nobody needs it, so that its first step after a promotion is not its slowest.

A forked process copies each page that it is the first to write, and torch looks up each kernel once. A training step
of a tiny model in advance takes 8 to 16 ms of that out of a recovery (medians of 15 forks each with and without it:
DistributedDataParallel set-up and first step of 8 x Linear(512, 512), on two busy cores).
"""

from __future__ import annotations

import torch
from torch import nn


def warm_up() -> None:
    """One step of a small transformer block with AdamW, on the CPU. Leaves torch's random numbers as they were."""
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        block = nn.Sequential(nn.Embedding(16, 32), nn.TransformerEncoderLayer(32, 2, 64, batch_first=True))
        head = nn.Linear(32, 16)
        optimizer = torch.optim.AdamW([*block.parameters(), *head.parameters()])
        tokens = torch.zeros(2, 8, dtype=torch.long)
        loss = nn.functional.cross_entropy(head(block(tokens)).flatten(0, 1), tokens.flatten())
        loss.backward()  # type: ignore[no-untyped-call] # torch leaves it untyped
        optimizer.step()
