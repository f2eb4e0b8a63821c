"""Judgement of evidence, and its consequences: findings, audits of training, differing digests and blame cases.

A node's state and whether it may be evicted belong in ``core.health``; how a job regroups belongs in ``core.jobs``.
"""
