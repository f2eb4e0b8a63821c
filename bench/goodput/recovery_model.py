"""How long a job stands still after a failure, on any number of nodes: measured where it could be, scaled by a model.

What was measured (docs/measures/recovery.md, ``bench.recovery``: 4 ranks on one machine) and how it is scaled:

detection
    A robust mutex tells the agent of a process's death, ``seen_s`` after it at any size
    (``bench.recovery_rows.deaths``). Without it the end of a socket tells, and the kernel closes sockets only once it
    has freed the process's memory: ``seen_by_socket_s``, by ``free_s_per_gib`` for each of ``touched_gib``. 10 GiB is a
    judgement: what a rank has touched besides the slots, which outlive it. Not in the model: a replacement on the same
    node starts only once the dead process is reaped. A GPU that drops out kills its process too, and its sensor names
    it within a poll, ``sensor_s``. A machine that is gone says nothing: its peers' collectives fail after
    ``peers_notice_s``, and the core believes them when the node is overdue (its own policy decides when).
decision and delivery
    ``decide_s`` (docs/measures/fleet.md, other latencies), and the roster to all: each node is sent all seats
    (``seat_bytes`` each, after deflation: 17,782 bytes are sent for 1,250 nodes) over the controller's network,
    ``controller_bytes_per_s``.
leaving and meeting
    ``leave_s`` (abort and teardown) does not grow: each process ends its own connections. ``meet_s`` was measured at 4
    ranks; every rank asks the store a fixed number of times, and the bootstrap of the largest communicator goes once
    around: ``meet_s_per_rank`` for each rank beyond. 1e-4 s is a judgement: a store that answers 60,000 requests a
    second, six a rank. Published: MegaScale (NSDI 2024) takes under 5 s at 2,048 GPUs and under 30 s beyond 10,000,
    2.4e-3 s a rank; a row shows what that would cost.
building and restoring
    ``build_s`` (the model's objects) as measured, times ten for a larger model. Survivors copy their own slots back:
    ``state_bytes_per_gpu`` over PCIe; a node that comes new fetches all of its GPUs' state over its own network cards.
    Both overlap in a roster that has newcomers, so the longer counts. Hashing runs beside it, at more than that rate.
first step
    Costs ``first_step_factor`` of a step more than others (72 ms where a step took 54).
spares
    Wait with a warm process (standby): ``activate_s`` for its CUDA context and communicators' buffers.
lost work
    The step that was interrupted, half of one on average; after corruption, everything since the last digests that
    agreed. Finished steps outlive the processes and nodes (``bench.recovery``: none lost), so nothing else is.
"""

from __future__ import annotations

from dataclasses import dataclass

GPUS_PER_NODE = 8


@dataclass(frozen=True)
class RecoveryModel:
    """Seconds and bytes; see the module's text for where they come from."""

    seen_s: float = 0.005
    touched_gib: float = 10.0
    free_s_per_gib: float = 0.35
    sensor_s: float = 1.0
    peers_notice_s: float = 1.0
    decide_s: float = 0.0025
    seat_bytes: float = 14.2
    controller_bytes_per_s: float = 3.1e9
    leave_s: float = 0.015
    meet_s: float = 0.015
    meet_s_per_rank: float = 1e-4
    build_s: float = 0.31
    state_bytes_per_gpu: float = 10e9
    pcie_bytes_per_s: float = 55e9
    nic_bytes_per_s: float = 50e9
    step_s: float = 5.0
    first_step_factor: float = 0.33
    activate_s: float = 2.0
    digest_interval_s: float = 50.0

    @property
    def seen_by_socket_s(self) -> float:
        """From a process's death until the end of its socket, where no mutex tells of it."""
        return self.seen_s + self.touched_gib * self.free_s_per_gib

    def delivery_s(self, nodes: int) -> float:
        """From the decision until the last node has the roster."""
        return self.decide_s + nodes * nodes * self.seat_bytes / self.controller_bytes_per_s

    def restore_s(self, newcomers: int) -> float:
        """State back on the GPUs; each newcomer fetches its own, at the same time as the others."""
        survivors = self.state_bytes_per_gpu / self.pcie_bytes_per_s
        if not newcomers:
            return survivors
        return max(survivors, GPUS_PER_NODE * self.state_bytes_per_gpu / self.nic_bytes_per_s) + self.activate_s

    def regroup_s(self, nodes: int, newcomers: int) -> float:
        """From a decision that interrupts until the first step is as far as it would have been without."""
        meet = self.meet_s + self.meet_s_per_rank * nodes * GPUS_PER_NODE
        again = self.build_s + self.restore_s(newcomers) + self.first_step_factor * self.step_s
        return self.delivery_s(nodes) + self.leave_s + meet + again

    def boundary_s(self, nodes: int, newcomers: int) -> float:
        """The same at a boundary: the roster was delivered while the running generation went on."""
        return self.regroup_s(nodes, newcomers) - self.delivery_s(nodes)
