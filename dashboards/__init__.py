"""Grafana dashboards and Prometheus rules for what Everstep exports."""
