"""A pipe that nobody reads: of the command's own streams it ends it, any other does not."""

import signal
import subprocess
import sys
import textwrap

import pytest

from tests import commands

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGPIPE"), reason="no such signal")


def _script(folder, body):
  path = folder / "script.py"
  lines = ["import os, sys, threading, time", "from launch import app", "def main():"]
  path.write_text("\n".join([*lines, textwrap.indent(body, "  "), "app.run(main)"]))
  return [sys.executable, str(path)]


def _environment():
  return {"PYTHONPATH": str(commands.ROOT), "JAX_PLATFORMS": "cpu", "PATH": ""}


_OWN_PIPE = """
told = []
def write():
  reader, writer = os.pipe()
  os.close(reader)
  try:
    os.write(writer, b"nobody reads")
  except BrokenPipeError:
    told.append(writer)
threads = [threading.Thread(target=write) for _ in range(20)]
for thread in threads:
  thread.start()
write()
for thread in threads:
  thread.join()
print("told", len(told))
"""


def test_pipes_of_its_own_do_not_end_a_command(tmp_path):
  """Checkpoints are saved by event loops that are woken, at times, after they have closed:
  under the system's own answer to SIGPIPE about one save in 500 ended the run without a word."""
  done = subprocess.run(
    _script(tmp_path, _OWN_PIPE), env=_environment(), capture_output=True, text=True
  )
  assert (done.returncode, done.stdout, done.stderr) == (0, "told 21\n", "")


@pytest.mark.cases(long=[4], slow=...)
@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize(
  "body",
  [
    "for i in range(10**6): print(i)",
    "time.sleep(0.3); print('one line, written as the process ends')",
    "time.sleep(0.3); app.fail('a fault')",
    "while True: print('a bar', file=sys.stderr); print('a line', flush=True)",
  ],
)
def test_an_unread_stream_ends_a_command_without_a_word(tmp_path, body, merged):
  with subprocess.Popen(
    _script(tmp_path, body),
    env=_environment(),
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT if merged else subprocess.PIPE,
  ) as process:
    process.stdout.close()
    stderr = b"" if merged else process.stderr.read()
  assert b"Traceback" not in stderr and b"Broken" not in stderr, stderr[-500:]
  quiet = "fail" in body and not merged  # nothing was written to the stream
  assert process.returncode == (2 if quiet else -signal.SIGPIPE)


@pytest.mark.cases(long=[1], slow=...)
@pytest.mark.parametrize(("stream", "code"), [(">&-", 0), ("> /dev/full", 120)])
def test_an_output_that_takes_nothing_ends_in_no_traceback_of_ours(tmp_path, stream, code):
  command = _script(tmp_path, "print('one line')")
  done = subprocess.run(
    ["/bin/sh", "-c", f'exec "$0" "$@" {stream}', *command],
    env=_environment(),
    capture_output=True,
    text=True,
  )
  assert done.returncode == code and "app.py" not in done.stderr, done.stderr
