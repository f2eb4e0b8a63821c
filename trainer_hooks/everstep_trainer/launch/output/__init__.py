"""Show and keep what ranks and the launcher print. Nothing here decides what is printed.

Ranks write into pipes, or into pseudo terminals where the launcher has a terminal. One thread copies that to the
launcher's own output and to bounded files, so that a stopped terminal or a slow disk does not stop the launcher.
"""
