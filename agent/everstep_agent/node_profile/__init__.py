"""The node profile: what a node has when it is well, its file, and the commands ``everstep-agent profile``.

Rules that judge what a node lacks against its profile belong in ``findings``; ``sensors`` take the polls.
"""
