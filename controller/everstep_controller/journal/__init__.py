"""Journal of the core's events and decisions: recording, replay, and trials of policy changes. No decision needs it."""
