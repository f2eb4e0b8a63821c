"""HTTP API for operators: FastAPI routes, authentication, credentials, admission control and the event stream."""
