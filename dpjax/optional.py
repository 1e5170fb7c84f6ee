"""Packages that `pip install .` leaves out, and the extra that installs each.

The core trains, accounts and samples in a notebook. The launchers also draw pictures, write event
files and read prepared data sets, which needs `pip install -e '.[runs]'`. Some data sets lie in
packages of the extra `data`; these are never imported, since only their files are read.
"""

from __future__ import annotations

import contextlib
import importlib.util
import pathlib
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
  "pydataset": "data",
  "seglearn": "data",
  "skimage": "data",
}
# Packages whose own requirements take gigabytes, or pin older versions of ours. Only their files
# are read, so no requirement is needed. The extra `data` names them in a comment.
WITHOUT_REQUIREMENTS = {"aeon": "aeon==1.6.0", "ISLP": "islp==0.6.0"}


def missing(error: BaseException) -> UserError | None:
  """Returns a one-line error that names a missing package and the extra that installs it.

  Args:
    error: any exception.

  Returns:
    None unless `error` is the failed import of a package in `EXTRA_OF`.

  >>> print(missing(ModuleNotFoundError("No module named 'PIL'", name="PIL")))
  needs PIL, which is not installed: pip install -e '.[runs]' in dpjax's clone
  """
  if not isinstance(error, ModuleNotFoundError):
    return None
  name = (error.name or "").partition(".")[0]
  if name not in EXTRA_OF:
    return None
  return _not_installed(name)


def _not_installed(name: str, extra: str = "") -> UserError:
  if name in WITHOUT_REQUIREMENTS:
    how = f"pip install --no-deps {WITHOUT_REQUIREMENTS[name]} (see the extra data)"
  else:
    how = f"pip install -e '.[{extra or EXTRA_OF[name]}]' in dpjax's clone"
  return UserError(f"needs {name}, which is not installed: {how}")


def folder(name: str) -> pathlib.Path:
  """Returns the folder of a package, without importing it.

  Raises:
    UserError: the package is not installed; the error says how to get it.

  >>> folder("numpy").name
  'numpy'
  """
  spec = importlib.util.find_spec(name)
  homes = [] if spec is None else list(spec.submodule_search_locations or ())
  if not homes:
    raise _not_installed(name)
  return pathlib.Path(homes[0])


@contextlib.contextmanager
def require_extra(extra: str = "") -> Iterator[None]:
  """Turns a failed import in the `with` block into a one-line error, if an extra has the package.

  Args:
    extra: the extra that brings whatever the block imports; "": the one in `EXTRA_OF`.

  Raises:
    UserError: names the package and the extra. Other errors pass unchanged.

  >>> with require_extra():
  ...   import math
  """
  try:
    yield
  except ImportError as error:
    name = error.name or str(error)
    explained = _not_installed(name, extra) if extra else missing(error)
    if explained is None:
      raise
    raise explained from error


def check(extra: str) -> None:
  """Raises UserError if a package of this extra is not installed; imports none of them.

  Call it before long work that needs the package only at its end.

  >>> check("an extra without packages")
  """
  for name, brought_by in EXTRA_OF.items():
    if brought_by == extra and importlib.util.find_spec(name) is None:
      raise _not_installed(name)
