"""The controller of a fleet: it decides who computes, with evidence and within a budget.

``core`` decides and does no I/O. ``runtime`` feeds it events, stores what it decides in one transaction and pushes
directives. ``server`` holds the port and the agents' sessions, ``api`` the REST routes, ``store`` the database,
``leadership`` the choice among several controllers, ``journal`` the recorded past, ``remediation`` the calls to Slurm,
Kubernetes and webhooks, and ``read_models`` what people and Prometheus are shown.
"""
