"""Find and describe the tracked state of a run: tensors, optimizers and Python state.

Where the state is stored belongs in ``slots`` and ``snapshot``, how it comes back in ``restore`` and ``importers``.
"""
