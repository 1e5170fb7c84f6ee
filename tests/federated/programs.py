"""Programs of a test that run side by side and must not wait for one another's output."""

import os
import pathlib
import socket
import subprocess
import sys
from typing import NamedTuple

import jax

ROOT = pathlib.Path(__file__).resolve().parents[2]
PATIENCE = 240  # seconds in which a program that goes on computes something
# Processor seconds of a program that waits for others: signs of life.
_WAITING = 1.0
_ENVIRONMENT = {
  "JAX_PLATFORMS": "cpu",
  "JAX_COMPILATION_CACHE_DIR": str(jax.config.jax_compilation_cache_dir),
  "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
}


class Program(NamedTuple):
  """A running Python program and where it writes: files, as a pipe that nobody reads would
  stop it, and with it all that wait for it."""

  process: subprocess.Popen
  out: pathlib.Path
  err: pathlib.Path

  def code(self):
    """Exit code, once it has ended: on a loaded machine it has the time that it needs."""
    used = 0.0
    while True:
      try:
        return self.process.wait(PATIENCE)
      except subprocess.TimeoutExpired:
        before, used = used, _processor_seconds(self.process.pid)
        if used < before + _WAITING:
          raise


def _processor_seconds(pid):
  status = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
  return (int(status[11]) + int(status[12])) / os.sysconf("SC_CLK_TCK")


def start(arguments, folder, name, **environment):
  """`python ARGUMENTS...` in the root of the repository."""
  inherited = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")}
  out, err = folder / f"{name}.out", folder / f"{name}.err"
  with out.open("w") as printed, err.open("w") as errors:
    process = subprocess.Popen(
      [sys.executable, *arguments],
      cwd=ROOT,
      env=inherited | _ENVIRONMENT | environment,  # JAX warns of proxies on stderr
      stdout=printed,
      stderr=errors,
    )
  return Program(process, out, err)


def stop(programs):
  """Leaves nothing running."""
  for program in programs:
    program.process.kill()
    program.process.wait()


def free_port():
  """A port of localhost that was free a moment ago."""
  with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    return probe.getsockname()[1]
