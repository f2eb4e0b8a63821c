"""Exact mode: training whose results do not depend on the number of ranks that compute them (docs/decisions/0007)."""
