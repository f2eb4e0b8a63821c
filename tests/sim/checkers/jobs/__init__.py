"""Checkers of jobs: states, generations, rosters and committed samples."""
