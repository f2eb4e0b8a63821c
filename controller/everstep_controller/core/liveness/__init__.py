"""Node liveness: registration, missed heartbeats, correlated silence and losses.

Whether a reachable node is fit to serve belongs to ``core.health``.
"""
