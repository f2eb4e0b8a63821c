"""Parts of the adapters: what one of them needs beside itself, or several need alike. Scripts do not import them.

A module that scripts import belongs in ``integrations``.
"""
