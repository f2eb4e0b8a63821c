"""Jobs: forming, membership, generations, losses, hangs, stragglers, preemption and their end.

Commits, replicas and storage of versions belong to ``core.checkpoints``; the state of a node belongs to
``core.health``.
"""
