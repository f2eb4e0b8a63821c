"""Checkpoints: commits, placement of copies, parity, storage and restore points.

The core decides where data must be and which node moves it. Vaults and ranks hold and move the bytes.
"""
