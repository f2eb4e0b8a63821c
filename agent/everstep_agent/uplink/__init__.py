"""The agent's line to the controller: what to say next, what waits to be said, and the connections that carry it."""
