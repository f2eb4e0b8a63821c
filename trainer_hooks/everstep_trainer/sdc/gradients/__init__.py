"""Check gradients between ranks: their norms, and the collective that adds them."""
