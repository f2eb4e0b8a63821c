"""Jobs: forming, generations, losses, hangs, stragglers, preemption and their end.

Choosing the nodes of a roster belongs in ``core.seats``; commits, replicas and storage of versions belong in
``core.checkpoints``; the state of a node belongs in ``core.health``.
"""
