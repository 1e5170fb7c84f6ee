"""Attacks every guarantee of the library: distinguishing games on worst-case neighbours.

  python -m launch.audit --all
  python -m launch.audit --only=Laplace --minutes=1 --out=runs/laplace
  python -m launch.audit --final_model=mnist --epsilon=10 --models=1000

Each mechanism, sampler, private transform, federated algorithm and relevance method is run
many times on two neighbouring inputs. An adversary tells the outputs apart. Its success proves a
lower bound on epsilon, at 99.9 % confidence; a bound above the claim refutes the claim.
Writes to --out as it goes: table.md (one row per subject: the game nearest to its claim),
table.csv (every game) and result.json. Their `ceiling` is the bound that perfect guesses
would have shown; a claim above it CANNOT be refuted by so few draws. Stop it at any time; the
same command goes on with what is left. Ten minutes on two cores by default. Exit code 1 if a
claim is refuted.

--final_model audits trainings that release their final parameters alone: many models of a data
set, trained from worst-case initial parameters (--initial) with a target record and without it.
Writes final_model.json to --out. 1,000 models of mnist with the target and as many without: two
to three minutes.
"""

from __future__ import annotations

import signal
import sys

from absl import flags

from dpjax.experiments.checks import long_games, many_models
from dpjax.validate import UserError
from launch import app

flags.DEFINE_bool("all", False, "Attack everything that has a game.")
flags.DEFINE_string(
  "only", "", "Attack one group, such as samplers, or subject, as Laplace."
)
flags.DEFINE_float("minutes", 10.0, "About how long, shared among the subjects.")
flags.DEFINE_integer("seed", 0, "Seed of all draws.", lower_bound=0, upper_bound=2**62 - 1)
flags.DEFINE_string("final_model", "", "Audit final models of this data set instead.")
flags.DEFINE_float("epsilon", 10.0, "Claimed by those trainings.", lower_bound=0.0)
flags.DEFINE_integer(
  "models", 1000, "With the target, and as many without.", lower_bound=2, upper_bound=10**6
)
flags.DEFINE_enum("initial", "worst_case", many_models.INITIAL, "Their first parameters.")
flags.DEFINE_string("out", "runs/audits", "Directory for table.md, table.csv, result.json.")


_OF_FINAL_MODELS = ("epsilon", "models", "initial")
_OF_GAMES = ("all", "only", "minutes")


def _refuse(names: tuple[str, ...], reason: str) -> None:
  for name in names:
    if flags.FLAGS[name].present:
      raise UserError(f"{reason}", field=name, value=flags.FLAGS[name].value)


def audit_final_models() -> None:
  """Trains final models for an audit, and prints the result in one line. A refuted claim ends the
  process with exit code 1."""
  options = flags.FLAGS
  _refuse(_OF_GAMES, "is of the games, must not be given with --final_model")
  settings = many_models.FinalModels(
    data=options.final_model,
    epsilon=options.epsilon,
    num_models=options.models,
    initial=options.initial,
    seed=options.seed,
  )
  with app.giving(final_model="data"):
    result = many_models.run(settings, options.out)
  print(many_models.line(result))
  print(f"wrote {options.out}/{many_models.RESULT}")
  if result["refuted"]:
    app.fail("the claim is refuted by the final model alone", code=1)


def main() -> None:
  """Plays games against claims, or audits final models, as the flags say."""
  options = flags.FLAGS
  if options.final_model:
    return audit_final_models()
  _refuse(_OF_FINAL_MODELS, "is of final models, needs --final_model=DATA")
  if options.all == bool(options.only):
    raise UserError(
      "give --all, or --only=NAME, and not both", field="only", value=options.only
    )
  try:
    play_claims()
  except KeyboardInterrupt:
    print(f"stopped; the same command goes on (out {options.out})", file=sys.stderr)
    sys.exit(128 + signal.SIGINT)


def play_claims() -> None:
  """Plays the games that have no row yet, and prints the table. A refuted claim ends the process
  with exit code 1."""
  options = flags.FLAGS
  settings = long_games.Settings(options.minutes, options.only, options.seed)
  rows = long_games.run(settings, options.out)
  print(long_games.table(rows), end="")
  print(f"wrote {options.out}/table.md, table.csv, result.json")
  few = long_games.idle(rows)
  if few:
    print(f"warning: {len(few)} claims had too few draws to be refuted, such as {few[0]}")
  broken = long_games.refuted_claims(rows)
  if broken:
    app.fail(f"{len(broken)} claims are refuted: {'; '.join(broken)}", code=1)


if __name__ == "__main__":
  app.run(main)
