"""From the newest whole version in the vaults to live tensors, in whatever layout the new generation has."""
