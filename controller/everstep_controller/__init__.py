"""Everstep's controller: it decides which nodes of a fleet compute, based on evidence and within an eviction budget.

Packages are layers, from top to bottom:

* ``app`` assembles the controller; ``main`` is its command.
* ``api`` has the REST routes, ``server`` the port and the agents' sessions, ``leadership`` the leader election.
* ``auth`` knows senders and their rights; ``remediation`` calls Slurm, Kubernetes and webhooks.
* ``runtime`` feeds events to the core, stores its decisions in one transaction and pushes directives.
* ``journal`` is the recorded past, ``read_models`` what people and Prometheus read.
* ``config`` has the settings, ``store`` the database, ``policy`` the rules of verdicts.
* ``core`` decides and does no I/O.
"""
