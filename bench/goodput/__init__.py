"""The share of a fleet's time that is training: 54 days of failures, decided by the real core."""
