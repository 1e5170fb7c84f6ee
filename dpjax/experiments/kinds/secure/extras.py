"""Checks of optional libraries before the first secure computation begins."""

from __future__ import annotations

from collections.abc import Callable

from dpjax.experiments.kinds.secure.config import SecureConfig, SumTask
from dpjax.secure.homomorphic import ckks
from dpjax.secure.sums import primitives
from dpjax.secure.vertical import alignment
from dpjax.validate import UserError

# Maps a name in a task's `needs` to a function that raises UserError if the library is missing.
_LIBRARIES: dict[str, Callable[[], object]] = {
  "ciphers": lambda: primitives.library(),
  "intersection": lambda: alignment.library(),
  "ciphertexts": lambda: ckks.library(),
}


def missing(config: SecureConfig) -> str:
  """Returns the error message about a missing library of a computation; "" if none is missing.

  Args:
    config: config of the computation.

  >>> from dpjax.secure.sums import PlainSum
  >>> missing(SecureConfig(task=SumTask(protocol=PlainSum())))
  ''
  """
  try:
    for name in config.task.needs:
      _LIBRARIES[name]()
    if isinstance(config.task, SumTask):
      config.task.protocol.check_library()
  except UserError as error:
    return str(error)
  return ""
