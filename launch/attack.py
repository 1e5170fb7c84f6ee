"""Attack a run: what a model tells about its records, what a message tells about a client.

  python -m launch.attack --config=configs/attack/quickstart.py --workdir=runs/attack
  python -m launch.attack --config=configs/attack/quickstart.py --workdir=runs/top_k \\
    --config.target.compression=top_k

Every field of the config (dpjax/experiments/kinds/attack/config.py) can be overridden by its
dotted name.
get_configs() of the file makes a table of it: --only='DLG, *' runs a part, --alone the config by
itself.
`target` in it is a config of launch.train or launch.federate, so a defence is one flag of
theirs: --config.target.privacy.epsilon=8, --config.target.compression=top_k.
Writes to --workdir: attacks.md and attacks.csv (attack, defence, what is found, what is
promised), attacks.png, sweep.json, points/ (one folder for each row). Stop it at any time; the
same command goes on where it stopped. Exit code 1 if one of several rows failed, or if an
attack is above what a guarantee allows.

--run=runs/X attacks one finished run of launch.train or launch.federate instead: membership
inference on its params.npz, with shadow models by its own config. Of a federated run that protects
users, the membership of clients is inferred, else that of records. Writes to --workdir (default:
attack_X beside the run) result.json, attacks.md, roc.csv and roc.png: AUC, the true positive rate
at 1 % and .1 % false positives, and what they say of epsilon beside what the run claims.
Exit code 1 if that is more than it claims.

THREATS.md lists all attacks, what they need and what defends.
"""

from __future__ import annotations

import os
import pathlib

from absl import flags

from dpjax import validate
from dpjax.experiments.kinds.attack import finished, table
from dpjax.experiments.run import loop, writers
from launch import app
from launch import main as shared

shared.define("attack", default="configs/attack/quickstart.py")
flags.DEFINE_string(
  "run", None, "Folder of a finished run to attack, central or federated."
)
flags.DEFINE_integer(
  "shadows", 16, "With --run: models trained beside it.", lower_bound=4, upper_bound=10_000
)


def attack_run() -> None:
  """Attacks the run of --run, and prints the results."""
  overrides = [name for name in flags.FLAGS if name.startswith("config.")]
  how = [name for name in shared.HOW if name != "workdir"]
  names = ("config", "print_config", *how, *overrides)
  app.refuse_given(names, "a table of attacks, without --run")
  workdir = flags.FLAGS.workdir
  if workdir is not None:
    validate.folder(workdir=workdir)
  folder = flags.FLAGS.run
  config = finished.attack_on(folder, num_shadows=flags.FLAGS.shadows)
  run = pathlib.Path(folder).resolve()
  # Beside the run, where a report looks for attacks.
  if workdir is None:
    workdir = os.path.relpath(run.parent / f"attack_{run.name}")
  app.prepare_memory([config.target])
  is_done = (pathlib.Path(workdir) / writers.RESULT).exists()
  with app.giving(shadows="attack.num_shadows"), app.stoppable(workdir):
    result = loop.train(config, workdir)
  print((pathlib.Path(workdir) / "attacks.md").read_text(), end="")
  written = f"{workdir}/result.json, attacks.md, roc.csv, roc.png"
  shared.show_end(table.summary_of_run(result), written, finished=is_done)
  if table.is_above(result):
    app.fail(f"above what a guarantee allows: {folder}", code=1)


def main() -> None:
  """Runs the rows of the table that have no result yet, and prints the table.

  With --run it attacks one finished run instead.
  """
  if flags.FLAGS.run is not None:
    return attack_run()
  app.refuse_given(("shadows",), "--run")
  return shared.main()


if __name__ == "__main__":
  app.run(main)
