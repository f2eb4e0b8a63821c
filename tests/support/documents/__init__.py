"""Parts of the documentation, and the command lines that it shows."""
