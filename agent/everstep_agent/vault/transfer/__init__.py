"""Move slots between the vaults of different nodes."""
