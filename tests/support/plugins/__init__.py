"""Plugins and settings of pytest and Hypothesis for the whole suite."""
