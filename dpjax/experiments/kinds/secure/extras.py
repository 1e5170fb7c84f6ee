"""Checks of optional libraries before the first secure computation begins."""

from __future__ import annotations

from collections.abc import Callable

from dpjax.experiments.config.fields import name_of
from dpjax.experiments.kinds.secure.config import SecureConfig, SumTask
from dpjax.secure.homomorphic import ckks
from dpjax.secure.sums import primitives
from dpjax.secure.vertical import alignment, encrypted_vectors
from dpjax.validate import UserError

# Maps a name in a task's `needs` to a function that raises UserError if the library is missing.
_LIBRARIES: dict[str, Callable[[], object]] = {
  "ciphers": lambda: primitives.library(),
  "intersection": lambda: alignment.library(),
  "ciphertexts": lambda: encrypted_vectors.library(ckks.INSTALL),
}
# Maps a protocol to the library that it needs. Clients that agree on keys need ciphers. Sums of
# ciphertexts need a library of ciphertexts. Other protocols need none.
_OF_PROTOCOLS = {
  **dict.fromkeys(("secagg", "secagg_plus", "committee"), "ciphers"),
  **dict.fromkeys(("bfv", "ckks"), "ciphertexts"),
}


def missing(config: SecureConfig) -> str:
  """Returns the error message about a missing library of a computation; "" if none is missing.

  Args:
    config: config of the computation.

  >>> from dpjax.secure.sums import PlainSum
  >>> missing(SecureConfig(task=SumTask(protocol=PlainSum())))
  ''
  """
  needed = list(config.task.needs)
  if isinstance(config.task, SumTask):
    needed += filter(None, [_OF_PROTOCOLS.get(name_of(config.task, "protocol"))])
  try:
    for name in needed:
      _LIBRARIES[name]()
  except UserError as error:
    return str(error)
  return ""
