"""Digest the raw bits of tensors: position-weighted sums modulo 2^64, in torch and in a kernel for GPUs.

What is digested, when, and what follows from a difference belong in the callers: ``sdc``, ``snapshot``, ``slots``.
"""
