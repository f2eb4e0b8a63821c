"""Data for people, Prometheus and OpenTelemetry: counters, trackers of reports, and views of the fleet.

``runtime`` records into them, and no decision depends on them. Serving them belongs in ``api``.
"""
