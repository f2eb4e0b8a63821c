"""Seats of nodes in jobs: the choice of a roster, and the index of the jobs that want a node.

Making the generation that follows belongs in ``core.jobs``.
"""
