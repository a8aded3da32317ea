"""The environment of all tests: default signal handlers, folders of their own, and plans without replicas."""

import atexit
import os
import shutil
import signal
import sys
import tempfile

# in a background job, or under nohup, these are ignored, and every child inherits that: tests that interrupt a command
# need them
for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
# every temporary file, and the state that commands keep of a user, in one folder for each process of pytest; what tests
# write in tmp_path stays for a look at it
os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
FOLDER = tempfile.mkdtemp(prefix="autopipe-tests-")
# at the exit, behind what multiprocessing registers later to remove its own folder in it
atexit.register(shutil.rmtree, FOLDER, ignore_errors=True)
os.environ["TMPDIR"] = tempfile.tempdir = FOLDER
os.environ["XDG_STATE_HOME"] = f"{FOLDER}/state"
# tests rewrite model files within a second, which bytecode files cannot tell apart
sys.dont_write_bytecode = True
# as ranks have: with more threads, sums and products are rounded differently
os.environ.setdefault("OMP_NUM_THREADS", "1")
# the models of tests are so small that one rank alone would be the fastest plan: commands cut them into stages, unless
# a test says otherwise
os.environ["AUTOPIPE_REPLICAS"] = "never"
