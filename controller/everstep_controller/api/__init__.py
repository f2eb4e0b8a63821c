"""HTTP: agents' hot routes as plain ASGI, operators' routes as FastAPI, one way of saying errors."""
