"""The daemon of a node: it watches the hardware, reports to the controller and owns checkpoint memory.

``drivers`` and ``sensors`` read the hardware, ``findings`` judges the samples by the rules in ``policy``, ``jobs``
knows
the launchers and ranks of this node, ``uplink`` talks to the controller, ``vault`` keeps checkpoints in shared memory
and copies them to peers, ``spill`` writes them to storage, ``probes`` tests GPUs on request, and ``virtual`` plays
hardware for tests and demonstrations. Only ``probes.child`` imports torch.
"""
