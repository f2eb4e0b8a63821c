"""Snapshot every step's state into shared memory: plan when tracked tensors change, then copy each step."""
