"""Views of the fleet for people and for Prometheus. No decision depends on them."""
