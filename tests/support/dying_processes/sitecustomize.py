"""Python runs this at its start where this folder is on PYTHONPATH: see ``tests.support.dying``."""

from tests.support import dying

dying.install()
