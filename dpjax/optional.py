"""Packages that `pip install dpjax` leaves out, and the extra that brings each.

The core trains, accounts and samples in a notebook. The launchers also draw pictures, write event
files and read prepared data sets: `pip install 'dpjax[runs]'`.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator

from dpjax.validate import UserError

# Name to import -> name of the extra in pyproject.toml.
EXTRA_OF = {
  "matplotlib": "runs",
  "PIL": "runs",
  "tensorboardX": "runs",
  "sklearn": "runs",
  "tensorflow_datasets": "runs",
  "array_record": "runs",
  "importlib_resources": "runs",
}


def missing(error: BaseException) -> UserError | None:
  """Returns the error of one line that names the extra of a package that is not installed.

  Args:
    error: of an import; any other has None.

  Returns:
    None where the package belongs to no extra of `EXTRA_OF`.

  >>> print(missing(ModuleNotFoundError("No module named 'PIL'", name="PIL")))
  needs PIL, which is not installed: pip install 'dpjax[runs]'
  """
  if not isinstance(error, ModuleNotFoundError):
    return None
  name = (error.name or "").partition(".")[0]
  if name not in EXTRA_OF:
    return None
  return _not_installed(name)


def _not_installed(name: str) -> UserError:
  return UserError(
    f"needs {name}, which is not installed: pip install 'dpjax[{EXTRA_OF[name]}]'"
  )


@contextlib.contextmanager
def needed() -> Iterator[None]:
  """Makes a block of imports end in one line where a package of an extra is not installed.

  Raises:
    UserError: it names the package and the extra. Other errors pass.

  >>> with needed():
  ...   import math
  """
  try:
    yield
  except ModuleNotFoundError as error:
    explained = missing(error)
    if explained is None:
      raise
    raise explained from error


def check(extra: str) -> None:
  """Raises UserError where a package of this extra is not installed; imports none of them.

  Call it before work that takes long, and would need the package only at its end.

  >>> check("an extra without packages")
  """
  for name, brought_by in EXTRA_OF.items():
    if brought_by == extra and importlib.util.find_spec(name) is None:
      raise _not_installed(name)
