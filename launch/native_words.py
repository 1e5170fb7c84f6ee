"""Filter between native code's standard error and the terminal; see `peers.run`.

If process 0 dies, JAX's runtime aborts the other processes with a stack trace, sometimes before
they have printed a line of their own. This separate script prints that line for them. It does
not import JAX.

  python native_words.py LINE < words

Lines pass unchanged until one names the runtime's coordination service, or ends in SAID. That
line and all later ones are dropped. At the end, LINE is printed if a line named the service and
none ended in SAID.
"""

import re
import signal
import sys

SAID = b"\0said\n"
_RUNTIME = re.compile(rb"coordination|distributed service", re.IGNORECASE)


def main() -> None:
  for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    # Signals are ignored, because this process ends when its input ends.
    signal.signal(number, signal.SIG_IGN)
  kept = False
  said = False
  for line in sys.stdin.buffer:
    said |= line.endswith(SAID)
    kept |= bool(_RUNTIME.search(line))
    if not (kept or said):
      sys.stderr.buffer.write(line)
      sys.stderr.flush()
  if kept and not said:
    print(sys.argv[1], file=sys.stderr, flush=True)


if __name__ == "__main__":
  main()
