"""Write slots to storage as checkpoints that any PyTorch program loads, beside training, without torch.

Choosing and reading slots in memory belongs in ``vault``.
"""
