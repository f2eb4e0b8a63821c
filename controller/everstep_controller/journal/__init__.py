"""Record what the core was told and decided, and decide it again."""
