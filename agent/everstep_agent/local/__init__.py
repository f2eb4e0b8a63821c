"""Serve the node itself, with or without a controller: its status, its health for scripts, and bundles of logs.

Launchers and ranks are served by ``everstep_agent.jobs``.
"""
