"""Vault processes and their clients, vaults that misbehave, and sealed slots."""
