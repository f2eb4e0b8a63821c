"""Detect hardware that computes wrong results: the chain of audits, its links and its schedule.

Here live the chain (`chain`, `build`, `audit`, `schedule`, `presets`) and the links that check one rank's own work.
The controller judges their statements.
"""
