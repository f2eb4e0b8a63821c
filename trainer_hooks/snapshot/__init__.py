"""Every step's state into shared memory: planned once in a generation, copied many times."""
