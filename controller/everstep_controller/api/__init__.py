"""HTTP API: operators' routes in FastAPI, authentication, credentials, admission control and the event stream.

Agents' routes and sessions are in ``server``; decisions are in ``core``.
"""
