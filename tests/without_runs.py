"""Runs a script or a module as after `pip install .` alone, without the extra `runs`.

python -m tests.without_runs script.py
python -m tests.without_runs -m launch.train --config=configs/quickstart.py
"""

import runpy
import sys

from dpjax import optional


class _Missing:
  """A finder that knows no package of the extra, like an environment without them."""

  def find_spec(self, name, path=None, target=None):
    del path, target
    if name.partition(".")[0] in optional.EXTRA_OF:
      raise ModuleNotFoundError(f"No module named {name!r}", name=name)


if __name__ == "__main__":
  sys.meta_path.insert(0, _Missing())
  sys.argv = sys.argv[1:]
  if sys.argv[0] == "-m":
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
  else:
    runpy.run_path(sys.argv[0], run_name="__main__")
