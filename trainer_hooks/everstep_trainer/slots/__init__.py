"""Fill, read and exchange the bytes of slots, which hold versions of the state in the vaults' memory.

Belongs here: what ``snapshot``, ``restore``, ``memory_tier`` and ``importers`` need alike, such as copies into and out
of slots, shares of the state, the choice of a version, values exchanged between ranks, and the client of the vault.
When a snapshot is taken belongs in ``snapshot``; what ranks agree on at a restore belongs in ``restore``.
"""
