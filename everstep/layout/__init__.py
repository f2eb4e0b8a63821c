"""Define the layout of checkpoint memory and of checkpoints on storage, over any buffer."""
