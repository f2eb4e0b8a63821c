"""Reference pages of the documentation site, made from the code when the site is built.

``hook.py`` is the MkDocs hook; each other module makes the Markdown of one or several pages. Nothing here is imported
by the programs.
"""
