"""Exact mode: training whose numbers do not depend on how many ranks compute them (docs/decisions/0030)."""
