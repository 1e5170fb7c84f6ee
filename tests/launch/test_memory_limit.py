"""A limit of memory under which JAX's native code crashes."""

import pathlib
import subprocess
import sys

import pytest

resource = pytest.importorskip("resource")
_ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("launcher", ["train", "list"])
def test_too_little_memory_is_one_line_before_jax_starts(launcher):
  limit = 2_000_000_000
  done = subprocess.run(
    [sys.executable, "-m", f"launch.{launcher}"],
    cwd=_ROOT,
    capture_output=True,
    text=True,
    check=False,
    preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
  )
  assert (done.returncode, done.stdout) == (1, "")
  assert done.stderr == (
    "error: ulimit -v: 2,000,000,000 bytes of memory are allowed; JAX needs 2,500,000,000 to "
    "start\n"
  )
