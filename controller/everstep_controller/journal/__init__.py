"""Journal of the core's events and decisions: recording, replay, and trials of policy changes. No decision needs it.

The event log that people read is in the database, and belongs in ``store``.
"""
