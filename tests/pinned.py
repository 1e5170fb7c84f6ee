"""The sources of dpjax that tests draw their noise for.

Noise of a run follows dpjax's sources (`dpjax.run_code`). A test of chance with a fixed seed
would draw anew with each edit, and fail for some. So tests name one version for all of them.
A program that a test starts by itself, and that goes on from a run of the test, pins it, too.
"""

from dpjax.experiments.run import config_names
from dpjax.run_code import packages
from tests import quick_compile

_SHA256 = "c21d5a959dd5011a7491d27fd25a9ae93d563ef865c0c09b5cb02c027fac8a5e"


def pin() -> None:
  """Lets this process, and those that it forks, draw as if dpjax had not been edited."""
  # By the names of then: a new field with a row of `_LATER` draws no test's noise anew.
  config_names.VERSION = 1
  packages._DPJAX = _SHA256
  packages.versions.cache_clear()
  # Bits of two processes are compared, too.
  quick_compile.install()
