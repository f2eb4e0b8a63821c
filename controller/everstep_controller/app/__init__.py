"""The assembled controller, the standby beside it, and the process that switches between them.

Only this package knows all others. What a part does belongs in the part's own package.
"""
