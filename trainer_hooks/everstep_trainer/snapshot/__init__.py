"""Snapshot every step's state into shared memory: plan when tracked tensors change, then copy each step.

How bytes get into slots belongs in ``slots``, what the state consists of in ``state``.
"""
