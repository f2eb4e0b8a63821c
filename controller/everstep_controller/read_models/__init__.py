"""Views of the fleet for people, Prometheus and OpenTelemetry. No decision depends on them."""
