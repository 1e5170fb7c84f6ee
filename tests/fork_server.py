"""The process that `tests/commands.py` starts: it imports dpjax, and forks for each command."""

import atexit
import gc
import importlib
import json
import os
import pathlib
import runpy
import sys
import threading

_ROOT = pathlib.Path(__file__).resolve().parents[1]


def import_everything():
  for path in sorted((_ROOT / "dpjax").rglob("*.py")):
    parts = path.relative_to(_ROOT).with_suffix("").parts
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
  import_everything()
  importlib.import_module("tests.pinned").pin()
  # A child's collector would walk, and so copy, all that was imported: half a second a command.
  gc.collect()
  gc.freeze()
  _become(*_orders())
