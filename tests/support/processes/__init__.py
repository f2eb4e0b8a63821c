"""Processes of tests: forked functions and programs, launchers, kill points, and waiting for other processes."""
