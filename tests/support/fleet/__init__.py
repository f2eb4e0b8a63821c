"""Controllers, fleets of nodes that report to them, and records and messages of a fleet; agents are in `agents`."""
