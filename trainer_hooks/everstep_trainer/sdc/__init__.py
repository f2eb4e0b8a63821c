"""Finding hardware that lies: digests that replicas must agree on."""
