"""Titles of processes: by rank, with the script's name, and never over one that the script has set."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.processes.launcher import ROOT

pytest.importorskip("setproctitle")
pytestmark = pytest.mark.slow  # a title is the process's, so each test has one of its own

SHOW = """
import os, pathlib, sys
from everstep_trainer.launch.forking.process_setup import set_process_name
from everstep_trainer.launch.forking.process_title import change_title, set_first_title

def show():
    command = pathlib.Path("/proc/self/cmdline").read_bytes().rstrip(b"\\0").decode()
    print(command, pathlib.Path("/proc/self/comm").read_text().strip(), sep="|")

environ = pathlib.Path("/proc/self/environ").read_bytes()
set_process_name("everstep-rank1")
"""
END = "\nassert pathlib.Path('/proc/self/environ').read_bytes() == environ\nassert 'SPT_NOENV' not in os.environ\n"


def shown(code: str) -> list[str]:
    command = [sys.executable, "-c", SHOW + code + END, "room" * 20]
    paths = ":".join(str(ROOT / folder) for folder in ("", "trainer_hooks"))
    done = subprocess.run(command, env={"PYTHONPATH": paths}, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_title_follows_the_rank_and_names_the_script() -> None:
    first = "set_first_title('standby', 'vit', 'src/train.py'); show()\n"
    assert shown(first + "change_title('rank 12'); show()") == [
        "everstep: standby of vit (train.py)|everstep-rank1",
        "everstep: rank 12 of vit (train.py)|everstep-rank1",
    ]


def test_title_that_the_script_has_set_stays() -> None:
    first = "set_first_title('standby', 'vit', 'src/train.py')\n"
    own = "import setproctitle; setproctitle.setproctitle('my training')\n"
    (line,) = shown(first + own + "change_title('rank 12'); show(); set_process_name('everstep-rank1')")
    assert line.startswith("my training|")


def test_title_of_a_script_whose_name_is_not_utf8() -> None:
    assert shown("set_first_title('rank 0', 'vit', 'tr\\udce4in.py'); show()") == [
        "everstep: rank 0 of vit (tr\ufffdin.py)|everstep-rank1"
    ]
