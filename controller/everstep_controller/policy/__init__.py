"""Rules of verdicts as data (TOML), and their reader: shipped rules, and a site's changes to them.

Applying a rule to findings belongs in ``core``.
"""
