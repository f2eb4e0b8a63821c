"""Judge nodes: findings, verdicts, eviction, quarantine, diagnostics and maintenance."""
