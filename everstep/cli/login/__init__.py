"""Logins of a person with the site's accounts: the commands, the flows through a browser, and what is kept."""
