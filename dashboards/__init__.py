"""Grafana dashboards and Prometheus rules for what Everstep exports.

One module holds one dashboard, as a table of panels; ``build`` writes the files in ``grafana/``. The rules in
``prometheus/`` are written by hand.
"""
