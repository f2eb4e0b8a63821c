"""The simulated processes: controllers, agents, launchers, ranks and vaults.

Each runs the product's own code over simulated connections. Parts that need torch, sockets or threads are modelled.
"""
