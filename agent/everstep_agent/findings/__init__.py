"""Judge samples: rules over time, XIDs, and the findings of this node.

Measuring belongs in ``sensors``; the rules themselves are data in ``policy``.
"""
