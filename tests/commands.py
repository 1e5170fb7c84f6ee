"""Commands as users type them, each in a process of its own that is forked after the imports.

A fresh interpreter needs longer to import JAX than most commands need to run. So every test
worker starts one process that imports all of dpjax, never starts JAX's backend, and forks
for each command: what a command does stays in its child (`tests/fork_server.py`).
"""

import atexit
import functools
import importlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[1]


def run(module, *arguments, cwd=ROOT, env=None):
  """`python -m MODULE ARGUMENTS...` in `cwd`, with `env` in place of the environment.

  Or `python MODULE ARGUMENTS...`, where it is a file.

  Returns:
    a `subprocess.CompletedProcess` with the exit code and both streams as text.
  """
  with tempfile.TemporaryDirectory() as folder:
    out, err = (pathlib.Path(folder) / name for name in ("out", "err"))
    order = [module, list(arguments), str(cwd), dict(env or os.environ), str(out), str(err)]
    server = _server()
    print(json.dumps(order), file=server.stdin, flush=True)
    code = json.loads(server.stdout.readline())
    return subprocess.CompletedProcess(
      [module, *arguments], code, out.read_text(), err.read_text()
    )


def refusal(done):
  """The one line in which a command (`run`) said what was wrong, with exit code 2."""
  lines = done.stderr.strip().splitlines()
  assert done.returncode == 2 and len(lines) == 1, done.stderr
  return lines[0]


def on_eight_devices(*arguments):
  """`python ARGUMENTS...` on eight devices that are made of a CPU.

  Returns:
    what the last line that it prints holds, as JSON.
  """
  xla_flags = importlib.import_module("tests.quick_compile").xla_flags(8)
  flags = {"XLA_FLAGS": xla_flags, "JAX_PLATFORMS": "cpu"}
  done = subprocess.run(
    [sys.executable, *arguments],
    cwd=ROOT,
    env=os.environ | flags,
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr[-3000:]
  return json.loads(done.stdout.splitlines()[-1])


@functools.cache
def _server():
  # Its name is put together here: a run whose code is in a test that calls commands would else
  # have the server's file in its code, which imports all, and so walk through hundreds of files.
  server = subprocess.Popen(
    [sys.executable, "-m", f"{__package__}.fork_server"],
    cwd=ROOT,
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    stderr=subprocess.DEVNULL,  # JAX warns of every fork; its backend is not started
    text=True,
  )
  atexit.register(server.communicate)  # closes its orders, upon which it ends
  return server
