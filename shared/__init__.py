"""What the chapters share: small modules, each with one job. Models live in the chapters."""

import signal
import sys
from pathlib import Path

# Importing torch takes seconds. Until cli.run takes over, Ctrl-C ends a page or a build.py at once
# and without a traceback. Only there: in a notebook or a test, nothing is changed.
PROJECTS = Path(__file__).resolve().parent.parent / "projects"
is_script = Path(sys.argv[0]).resolve().parent.parent == PROJECTS
if is_script and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
