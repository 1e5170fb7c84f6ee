"""Filter between native code's standard error and the terminal; see `peers.run`.

Where process 0 dies, JAX's runtime aborts the others with a stack trace, at times before they
could say a word of their own. A process that aborts says nothing afterwards, so this one does:
a script of its own, which imports nothing of JAX.

  python native_words.py LINE < words

Words pass as they are, until the runtime speaks of its coordination service; those and what
follows are kept back. When the words end and none was "SAID", LINE is printed in their place.
"""

import re
import signal
import sys

SAID = b"\0said\n"
_RUNTIME = re.compile(rb"coordination|distributed service", re.IGNORECASE)


def main() -> None:
  for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    # It ends when its input ends.
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
