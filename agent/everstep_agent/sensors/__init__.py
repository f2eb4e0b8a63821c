"""Passive measurement of a node. Sensors return results and never raise; silence is a result too.

Judging samples belongs in ``findings``.
"""
