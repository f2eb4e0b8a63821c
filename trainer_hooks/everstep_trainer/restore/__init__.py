"""Restore live tensors, in any layout of the new generation, from the newest complete version in the vaults.

How slots are read belongs in ``slots``, ordinary checkpoints in ``importers``.
"""
