"""HTTP API for operators: FastAPI routes, admission control, the event stream, the web page and the OpenAPI document.

Agents' sessions belong in ``server``, what the answers show in ``read_models``, and who may ask in ``auth``.
"""
