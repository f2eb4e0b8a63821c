"""The vault: a small process that owns a node's checkpoint memory and outlives the ranks and the agent.

``process`` starts the vault and ``service`` answers the node's ranks and supervisor. ``memory`` owns the segment files,
``transfer`` copies slots between nodes, ``parity`` protects groups of shards with two parity shards, and ``repair``
scrubs and repairs slots. ``manager`` is the supervisor's side. Writing checkpoint files belongs in ``spill``.
"""
