"""The work around the steps of one generation: track, restore, snapshot, report, and guard the loss.

A session puts ``restore``, ``snapshot``, ``importers`` and ``runtime`` together for ``run``. What outlives a generation
belongs in ``worker``.
"""
