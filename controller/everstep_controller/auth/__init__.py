"""Authentication and authorization of requests: tokens, certificates, logins and rate limits.

Routes and the answers to refused requests belong in ``api`` and ``server``.
"""
