"""Active checks: an all-reduce between nodes, arithmetic on one. Only ``child`` imports torch."""
