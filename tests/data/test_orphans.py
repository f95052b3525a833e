"""A process whose parent is killed ends too."""

import os
import signal
import subprocess
import sys

CHILD = """
import signal, time
from data.tasks import die_with_parent
die_with_parent(signal.SIGTERM)
print("ready", flush=True)
time.sleep(3)
print("still here", flush=True)
"""
PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {CHILD!r}])"


def test_a_killed_parent_takes_its_child_with_it():
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE) as parent:
        assert parent.stdout.readline() == b"ready\n"
        os.kill(parent.pid, signal.SIGKILL)
        assert parent.stdout.read() == b""  # returns when the child, which holds the pipe, is gone
