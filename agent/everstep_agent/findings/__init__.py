"""Judge samples: rules over time, XIDs, the findings of this node, and the process that takes the samples.

Measuring belongs in ``sensors``, what the node has when it is well in ``node_profile``; the rules themselves are data
in ``policy``.
"""
