"""Two parity shards for k data shards on other nodes: what they are made of, and how up to two losses come back.

``stripes`` and ``gf`` are the arithmetic, over buffers; ``manifest`` what a parity shard says of itself; ``shards``
reads members and parity wherever they are; ``encode`` makes a group's P or Q on its home; ``decode`` a lost member from
what is left.
"""
