"""The vault: a small process that owns a node's checkpoint memory, so that it outlives whoever fills it.

``main`` starts it; ``local`` and ``service`` answer the node's ranks and supervisor; ``segments`` and ``memory`` own
the files; ``reading`` and ``scrub`` believe nothing that does not hash right; ``channel``, ``peers``, ``serve`` and
``receive`` speak with other nodes' vaults; ``replicate`` and ``fetch`` decide what is sent and got; ``parity`` makes
and reads groups of shards with two parities.
"""
