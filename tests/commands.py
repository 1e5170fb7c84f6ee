"""Commands as users type them, each in a process of its own that is forked after the imports.

A fresh interpreter needs longer to import JAX than most commands need to run. So every test
worker starts one process that imports all of dpjax, never starts JAX's backend, and forks
for each command: what a command does stays in its child.
"""

import atexit
import functools
import gc
import importlib
import json
import os
import pathlib
import runpy
import subprocess
import sys
import tempfile
import threading

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
  server = subprocess.Popen(
    [sys.executable, __file__],
    cwd=ROOT,
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    stderr=subprocess.DEVNULL,  # JAX warns of every fork; its backend is not started
    text=True,
  )
  atexit.register(server.communicate)  # closes its orders, upon which it ends
  return server


def import_everything():
  for path in sorted((ROOT / "dpjax").rglob("*.py")):
    parts = path.relative_to(ROOT).with_suffix("").parts
    importlib.import_module(".".join(parts[:-1] if parts[-1] == "__init__" else parts))


def _orders():
  """Serves; returns in each child, with the order that it is to carry out."""
  for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
      return json.loads(line)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
  sys.exit()


def _become(module, arguments, cwd, env, out, err):
  for number, path, flags in (
    (0, os.devnull, os.O_RDONLY),
    (1, out, os.O_CREAT | os.O_WRONLY),
    (2, err, os.O_CREAT | os.O_WRONLY),
  ):
    os.dup2(os.open(path, flags), number)
  os.environ.clear()
  os.environ.update(env)
  os.chdir(cwd)
  named = env.get("PYTHONPATH", "").split(os.pathsep)
  sys.path[:1] = [cwd, *(path for path in named if path and path not in sys.path)]
  sys.argv = [module, *arguments]
  code = None
  try:
    if module.endswith(".py"):
      runpy.run_path(module, run_name="__main__")
    else:
      runpy.run_module(module, run_name="__main__", alter_sys=True)
  except SystemExit as end:
    code = end.code
  if code is None or isinstance(code, int):
    _end(code or 0)
  sys.exit(code)


def _end(code):
  """Ends as the interpreter does, but for the memory, which the system takes back.

  To give back what all of dpjax imports takes a quarter of a second, longer than many a command.
  """
  for thread in threading.enumerate():
    if not thread.daemon and thread is not threading.current_thread():
      thread.join()
  atexit._run_exitfuncs()
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(code)


if __name__ == "__main__":
  sys.path.insert(0, str(ROOT))
  import_everything()
  importlib.import_module("tests.pinned").pin()
  # A child's collector would walk, and so copy, all that was imported: half a second a command.
  gc.collect()
  gc.freeze()
  _become(*_orders())
