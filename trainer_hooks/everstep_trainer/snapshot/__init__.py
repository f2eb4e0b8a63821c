"""Every step's state into shared memory: planned when tracked tensors are found or change, copied many times."""
