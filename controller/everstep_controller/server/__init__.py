"""Network server: the listener, connections, agents' sessions and error responses.

Operators' routes belong in ``api``. The server knows the process that it serves only by its protocols.
"""
