"""Attack a run: what a model tells about its records, what a message tells about a client.

  python -m launch.attack --config=configs/attack/quickstart.py --workdir=runs/attack
  python -m launch.attack --config=configs/attack/quickstart.py --workdir=runs/top_k \\
    --config.federate.compression=top_k

Every field of the config (dpjax/runs/attack/config.py) can be overridden by its dotted name.
`train` and `federate` in it are configs of launch.train and launch.federate, so a defence is
one flag of theirs: --config.train.privacy.epsilon=8, --config.federate.compression=top_k.
Writes to --workdir: attacks.md and attacks.csv (attack, defence, what is found, what is
promised), attacks.png, sweep.json, points/ (one folder for each row). Stop it at any time; the
same command goes on where it stopped. Exit code 1 if one of several rows failed, or if an
attack is above the line that a promise allows.

--threats prints the table of all attacks, what they need and what defends (THREATS.md).
"""

from __future__ import annotations

import pathlib

from absl import flags

from dpjax.attacks import registry
from dpjax.runs.attack.config import AttackConfig
from dpjax.sweeps import attack_table
from launch import app, config_flag

config_flag.define(kind=AttackConfig, default="configs/attack/quickstart.py")
flags.DEFINE_string(
  "workdir", None, "Directory of this table (default: runs/attack_<config>)."
)
flags.DEFINE_bool("threats", False, "Print the page of threats, and do nothing else.")
app.define_dry_run()


def main() -> None:
  """Runs what is left of the table."""
  if flags.FLAGS.threats:
    fields = [name for name in flags.FLAGS if name.startswith("config.")]
    app.refuse_given(("config", "workdir", "dry_run", *fields), "a run, without --threats")
    return print(registry.page(), end="")
  app.refuse_given(("dry_run",), "launch.train or launch.federate, whose runs are attacked")
  config, workdir = config_flag.get(), config_flag.workdir("attack_")
  with app.stoppable(workdir):
    rows = attack_table.run_all(config, workdir)
  app.refuse_failed(rows)
  print((pathlib.Path(workdir) / "attacks.md").read_text(), end="")
  print(f"wrote {workdir}/attacks.md, attacks.csv, attacks.png")
  above = [row["name"] for row in rows if attack_table.is_above(row)]
  if above:
    app.fail(f"above the line that a promise allows: {', '.join(above)}", code=1)


if __name__ == "__main__":
  app.run(main)
