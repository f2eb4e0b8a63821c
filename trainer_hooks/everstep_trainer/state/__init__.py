"""Find and describe the tracked state of a run: tensors, optimizers and Python state."""
