"""Detect hardware that computes wrong results: the chain of audits and its schedule.

Here live the chain (`chain`, `build`, `audit`, `schedule`, `presets`) and the audits that check one rank's own work.
The controller judges their statements, so nothing here decides what happens to a node. Digests of tensors belong in
``digests``.
"""
