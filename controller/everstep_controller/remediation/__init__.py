"""Doing to machines what was decided: draining, rebooting, handing to repair. Default: say it in the log only."""
