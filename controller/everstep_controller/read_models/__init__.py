"""Show the state of the fleet to people and to Prometheus; no decision rests on these."""
