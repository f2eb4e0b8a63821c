"""The decision core: plain data in, plain data out.

``engine.handle(state, event, now)`` returns a list of effects. The core has no clock, no randomness and no I/O: the
caller passes the time, and events carry secrets and trace ids. Anything that reads a clock or does I/O belongs outside
this package.
"""
