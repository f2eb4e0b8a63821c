"""How much of a fleet's time is training: 54 days of failures, decided by the real core."""
