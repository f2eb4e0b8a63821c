"""Checkpoints on storage that any PyTorch program loads: written from slots, beside training, without torch."""
