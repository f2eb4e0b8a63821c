"""Checkers of checkpoints: copies, parity, storage and restored versions."""
