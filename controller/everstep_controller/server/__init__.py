"""Hold the port: the listener, connections, agents' sessions, and how errors are said."""
