"""Find and describe the tracked state of a run: tensors, optimizers, Python state."""
