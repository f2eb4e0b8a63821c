"""Install kill points in each Python process with this folder on its PYTHONPATH."""

from tests.support.processes import kill_points

kill_points.install()
