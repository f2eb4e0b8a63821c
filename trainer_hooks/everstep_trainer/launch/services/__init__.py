"""The agent and the controllers that a launcher works with: found, met with other launchers, or started for it alone.

What the launcher does with ranks, and what it prints, belongs in ``launch``.
"""
