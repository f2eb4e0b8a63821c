"""The usual way, in the same failures: a checkpoint to storage every half hour, and everything starts again.

A job manager notices that a process died at once, a machine that is gone or a hang when torch's collective time-out
ends (10 minutes for NCCL). Then: a new allocation, processes and containers, communicators (MegaScale's published
figure), and the checkpoint from storage (Llama 3's: 2 TB/s sustained). Nodes are replaced without a wait; checkpoints
cost nothing to write. Both favour it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from bench.failures import Failure
from bench.goodput.recovery_model import GPUS_PER_NODE
from bench.goodput.symptoms import SYMPTOMS, Sign

HOUR_S = 3600.0


@dataclass(frozen=True)
class RestartAll:
    """Seconds and bytes of the policy."""

    checkpoint_every_s: float = 1800.0
    death_noticed_s: float = 30.0
    silence_noticed_s: float = 600.0
    allocation_s: float = 120.0
    meet_s_per_rank: float = 2.4e-3
    storage_bytes_per_s: float = 2e12
    state_bytes_per_gpu: float = 10e9

    def start_s(self, nodes: int) -> float:
        """From notice to the first step."""
        ranks = nodes * GPUS_PER_NODE
        return (
            self.allocation_s
            + self.meet_s_per_rank * ranks
            + ranks * self.state_bytes_per_gpu / self.storage_bytes_per_s
        )

    def ratio(self, nodes: int, hours: float, failures: Iterable[Failure]) -> float:
        """Share of the time that brought the job forward. Corruption is not noticed, and not counted."""
        trained = 0.0
        stepping_from = self.start_s(nodes)
        for failure in sorted(failures):
            at, sign = failure.at_h * HOUR_S, SYMPTOMS[failure.cause].sign
            if sign is Sign.LIE or min(failure.nodes) >= nodes:
                continue
            if at > stepping_from:
                stepped = at - stepping_from
                trained += stepped - stepped % self.checkpoint_every_s
            noticed_s = self.silence_noticed_s if sign is Sign.SILENCE else self.death_noticed_s
            stepping_from = max(stepping_from, at + noticed_s + self.start_s(nodes))
        trained += max(0.0, hours * HOUR_S - stepping_from)
        return trained / (hours * HOUR_S)
