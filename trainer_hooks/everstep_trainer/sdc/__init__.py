"""Detect hardware that computes wrong results: digests that replicas must agree on."""
