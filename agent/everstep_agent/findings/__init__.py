"""Judge samples: rules over time, XIDs, and the findings of this node."""
