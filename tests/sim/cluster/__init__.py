"""The simulated cluster: its world, machines, network, database, storage, scheduler and operators, in virtual time.

Processes that run on machines are in ``tests.sim.processes``.
"""
