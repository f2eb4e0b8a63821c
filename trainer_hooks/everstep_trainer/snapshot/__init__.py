"""Snapshot every step's state into shared memory: plan when tracked tensors are found or change, then copy each
step."""
