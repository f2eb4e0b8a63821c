"""Judge whether nodes are there: registration, missed heartbeats, correlated silence."""
