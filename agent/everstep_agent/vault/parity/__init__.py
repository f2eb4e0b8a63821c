"""Two parity shards for k data shards on other nodes, and recovery from up to two losses.

``galois`` is the arithmetic over buffers. ``shards`` describes shards and reads them wherever they are. ``coding``
makes a group's P or Q and recovers lost shards.
"""
