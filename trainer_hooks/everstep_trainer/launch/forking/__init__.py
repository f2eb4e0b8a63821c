"""Fork worker processes from one process that has imported torch: the server, its client, and their messages."""
