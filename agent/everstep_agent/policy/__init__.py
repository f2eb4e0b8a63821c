"""Rules and tables that say what a sample, a line or an error number means: their formats, and a site's changes.

Each TOML rule has its finding, its action, its end, and the source of its threshold; each CSV file is a table of error
numbers. Judging samples by them belongs in ``findings``.
"""
