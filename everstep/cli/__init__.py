"""The operator's command line, over the controller's REST API.

Decisions belong in the controller; this package only asks, sends and prints.
"""
