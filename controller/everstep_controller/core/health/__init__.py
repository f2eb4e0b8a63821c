"""Node health: states, offences, outbreaks, diagnostics, quarantine, remediation and eviction.

What a finding leads to belongs in ``core.judgement``, whether a node is reachable in ``core.liveness``, and what its
jobs do about a loss in ``core.jobs``.
"""
