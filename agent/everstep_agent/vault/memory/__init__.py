"""Checkpoint slots in shared memory: segments, pages, reading, and adoption after a restart.

Network transfer belongs in ``transfer``.
"""
