"""The vault: a small process that owns a node's checkpoint memory and outlives the ranks and the agent.

``process`` starts it, ``service`` answers the node's ranks and supervisor, and ``manager`` is the supervisor's side.
``repair`` scrubs and repairs slots. Writing checkpoint files belongs in ``spill``.
"""
