"""Two parity shards for k data shards on other nodes: what they are made of, and how up to two losses come back.

``gf`` is the arithmetic, over buffers.
"""
