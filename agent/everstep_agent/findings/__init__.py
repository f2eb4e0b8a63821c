"""Judge samples: rules over time, XIDs, the findings of this node, and the process that takes the samples.

Measuring belongs in ``sensors``; the rules themselves are data in ``policy``.
"""
