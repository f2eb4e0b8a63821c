"""Leader election among several controllers, and handover between them.

Statements that read and write the lease belong in ``store``, the roles of a process in ``app``.
"""
