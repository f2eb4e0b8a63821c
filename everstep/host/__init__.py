"""Questions to this machine: processes, what they do and when they end, control groups, private files, state folders.

Nothing here knows messages, settings or torch. The clocks are in ``clock`` and ``system_clock``.
"""
