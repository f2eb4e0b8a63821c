"""Judge samples by the rules in ``policy``: the findings of this node, and the process that takes the samples.

Measuring belongs in ``sensors``, and what the node has when it is well in ``node_profile``.
"""
