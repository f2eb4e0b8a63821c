"""The agent's connection to the controller: protocol state, unsent reports, credentials and sockets.

The content of reports belongs in the packages that make them.
"""
