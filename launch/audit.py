"""Attacks every promise of the library: distinguishing games on worst-case neighbours.

  python -m launch.audit --all
  python -m launch.audit --only=Laplace --minutes=1 --out=runs/laplace

Each mechanism, sampler, private transform, federated algorithm and relevance method is run
many times on two neighbouring inputs, and an adversary tells the outputs apart. What it
proves is a lower bound on epsilon, at 99.9 % confidence; a bound above the claim refutes it.
Writes to --out as it goes: table.md (one row per subject: the game nearest to its claim),
table.csv (every game) and result.json. Stop it at any time; the same command goes on with
what is left. Ten minutes on two cores by default. Exit code 1 if a claim is refuted.
"""

from __future__ import annotations

import signal
import sys

from absl import flags

from dpjax.checks import long_games
from dpjax.validate import UserError
from launch import app

flags.DEFINE_bool("all", False, "Attack everything that has a game.")
flags.DEFINE_string("only", "", "Attack one room (mechanisms, samplers, transforms, "
                    "federated, relevance) or one subject, such as Laplace.")  # fmt: skip
flags.DEFINE_float("minutes", 10.0, "About how long, shared among the subjects.")
flags.DEFINE_integer("seed", 0, "Of all draws.", lower_bound=0, upper_bound=2**62 - 1)
flags.DEFINE_string("out", "runs/audits", "Directory for table.md, table.csv, result.json.")


def main() -> None:
  """Plays what is left, and prints the table."""
  options = flags.FLAGS
  if options.all == bool(options.only):
    raise UserError(f"only={options.only!r}: give --all, or --only=NAME, and not both")
  settings = long_games.Settings(options.minutes, options.only, options.seed)
  try:
    rows = long_games.run(settings, options.out)
  except KeyboardInterrupt:
    print(f"stopped; the same command goes on (out {options.out})", file=sys.stderr)
    sys.exit(128 + signal.SIGINT)
  print(long_games.table(rows), end="")
  print(f"wrote {options.out}/table.md, table.csv, result.json")
  broken = long_games.refuted(rows)
  if broken:
    app.fail(f"{len(broken)} claims are refuted: {'; '.join(broken)}", code=1)


if __name__ == "__main__":
  app.run(main)
