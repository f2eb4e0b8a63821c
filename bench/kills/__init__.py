"""Training scripts in many styles, for kills of random ranks; run by `bench.integration_kills`."""
