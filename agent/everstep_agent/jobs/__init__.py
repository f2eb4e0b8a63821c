"""Jobs of this node: connected launchers and ranks, and the losses that ended connections mean.

Hardware checks belong in ``sensors``, checkpoint memory in ``vault``.
"""
