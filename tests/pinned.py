"""Keys that tests draw in place of the operating system's: a test of chance has one outcome.

Two runs of one test draw two keys, as anywhere. But each test, and each fixture, draws the same
keys whenever it runs.
"""

import os
import random
import types

from dpjax.experiments.run import run_keys
from tests import quick_compile


def pin() -> None:
  """Makes the bits of two processes comparable: those that tests start call it, too.

  They wait for no disk, either: no test loses power, and a run syncs a hundred times. `fstat`
  refuses the descriptors that `fsync` refuses.
  """
  quick_compile.install()
  os.fsync = os.fstat


def restart(name: str) -> None:
  """Lets the keys of runs follow from a name from here on, whether or not it stands in the core."""
  draws = random.Random(name.replace("tests/core/", "tests/"))
  run_keys.secrets = types.SimpleNamespace(token_bytes=draws.randbytes)
