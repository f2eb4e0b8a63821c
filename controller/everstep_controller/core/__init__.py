"""The decision core: plain data in, plain data out.

``fleet.handle(state, event, now) -> effects`` is the whole of it. No clock, no randomness, no I/O: time is an
argument, secrets and trace ids come with the events, and what is to be done comes back as a list.
"""
