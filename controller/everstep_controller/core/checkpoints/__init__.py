"""Decide about checkpoints: commits, placement of copies, parity, storage, restore points."""
