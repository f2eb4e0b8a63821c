"""Know the jobs of this node: connected launchers and ranks, and what a lost connection means."""
