"""Node health: findings, verdicts, eviction, quarantine, diagnostics, remediation and maintenance.

Whether a node is reachable belongs to ``core.liveness``; what its jobs do about a loss belongs to ``core.jobs``.
"""
