"""A rank's connections while it trains: to its agent, and to the process group of its generation.

Belongs here: the agent's directives, aborts of collectives, and reports of a rank that stands still. The loop over
generations belongs in ``worker``, the work around steps in ``session``, and what lower packages need too in ``base``.
"""
