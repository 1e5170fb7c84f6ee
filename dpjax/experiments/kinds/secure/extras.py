"""Libraries that secure computations need, asked for before the first one begins."""

from __future__ import annotations

from dpjax.experiments.config.fields import name_of
from dpjax.experiments.kinds.secure.config import SecureConfig
from dpjax.secure.homomorphic import ckks
from dpjax.secure.sums import primitives
from dpjax.secure.vertical import alignment, encrypted_vectors
from dpjax.validate import UserError

# Sums whose clients agree on keys, and sums of ciphertexts.
_OF_KEYS = ("secagg", "secagg_plus", "committee")
_OF_CIPHERTEXTS = ("bfv", "ckks")
_ON_SHARES = ("train", "noisy_model", "columns")
_ALIGNED = ("columns", "transfer")


def missing(config: SecureConfig) -> str:
  """Returns the line about a library that a computation needs and does not find; "" for none.

  Args:
    config: of one computation, without rows.

  >>> from dpjax.experiments.kinds.secure.config import SumTask
  >>> from dpjax.secure.sums import PlainSum
  >>> missing(SecureConfig(task=SumTask(), protocol=PlainSum()))
  ''
  """
  task = name_of(config, "task")
  protocol = name_of(config, "protocol") if task == "sum" else ""
  try:
    # The dealer of a training on shares expands seeds by the same ciphers.
    if task in _ON_SHARES or protocol in _OF_KEYS:
      primitives.library()
    if task in _ALIGNED:
      alignment.library()
    if task in ("regress", "infer") or protocol in _OF_CIPHERTEXTS:
      encrypted_vectors.library(ckks.INSTALL)
  except UserError as error:
    return str(error)
  return ""
