"""Active checks: an all-reduce between nodes, arithmetic and memory tests on one. Only ``child`` imports torch.

Passive measurement belongs in ``sensors``.
"""
