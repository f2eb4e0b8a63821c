"""Everstep's controller: it decides which nodes of a fleet compute, based on evidence and within an eviction budget.

``core`` decides and does no I/O. ``runtime`` feeds it events, stores its decisions in one transaction and pushes
directives. ``server`` holds the port and the agents' sessions, ``api`` the REST routes, ``store`` the database,
``leadership`` the leader election, ``journal`` the recorded past, ``remediation`` the calls to Slurm, Kubernetes and
webhooks, and ``read_models`` the views for people and Prometheus.
"""
