"""Network server: the listener, connections, agents' sessions, error responses. Operators' routes are in ``api``."""
