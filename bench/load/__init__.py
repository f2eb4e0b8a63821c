"""Parts of ``bench.fleet_load``: a crowd of lean agents, the controller under measurement, and the trials."""
