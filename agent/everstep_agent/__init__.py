"""The daemon of a node: watch the hardware, report to the controller and own checkpoint memory.

``drivers`` and ``sensors`` read the hardware; ``findings`` judges the samples by the rules in ``policy``, and
``node_profile`` remembers what the node has when it is well. ``jobs`` tracks the launchers and ranks of this node, and
``uplink`` talks to the controller. ``vault`` keeps checkpoints in shared memory and copies them to peers; ``spill``
writes them to storage. ``probes`` tests GPUs on request; ``virtual`` simulates hardware for tests and demonstrations.
Only ``probes.child`` imports torch.
"""
