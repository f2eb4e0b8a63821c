"""Divide a step over ranks: replicas of the model, gradients, and exact mode.

Process groups themselves belong in ``runtime``; checks of what ranks exchange belong in ``sdc``.
"""
