"""Keep torch.distributed.checkpoint data of a script's own calls in the vaults' memory.

Snapshots that Everstep takes by itself belong in ``snapshot``, the client of the vault in ``slots``.
"""
