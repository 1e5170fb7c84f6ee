"""Compute on data that nobody sees: sums, regression and inference, against the same in the clear.

  python -m launch.secure --config=configs/secure/quickstart.py --workdir=runs/secure
  python -m launch.secure --config=configs/secure/quickstart.py --workdir=runs/three \\
    --config.rows="{'secagg, 3 silent': {'task.silent': 3}}"

Every field of the config (dpjax/experiments/kinds/secure/config.py) can be overridden by its
dotted name.
Writes to --workdir: secure.md and secure.csv (task, protocol, sizes, seconds, bytes, error
against plain, what is hidden from whom), secure.png, sweep.json, points/ (one folder for each
row). Stop it at any time; the same command goes on where it stopped (a sum or a regression is
one step, and a stop waits for its end). Exit code 1 if one of several rows failed. Rows whose
extra is not installed (pip install -e '.[secure,he]') are left out, and named first. All parties
run on this machine: the command measures, and keeps no secret from you.
"""

from __future__ import annotations

import pathlib

from absl import flags

from dpjax.experiments.sweeps import secure_table
from dpjax.experiments.sweeps.secure_table import SECURE
from launch import app, config_flag

config_flag.define(kind=SECURE, default="configs/secure/quickstart.py")
flags.DEFINE_string(
  "workdir", None, "Directory of this table (default: runs/secure_<config>)."
)
app.define_dry_run()


def main() -> None:
  """Runs the rows of the table that have no result yet, and prints the table."""
  app.refuse_given(("dry_run",), "a run of many steps; a sum or a regression is one")
  config = config_flag.get()
  workdir = config_flag.workdir("secure_")
  with app.stoppable(workdir):
    rows = secure_table.run_all(config, workdir)
  app.refuse_failed(rows)
  print((pathlib.Path(workdir) / "secure.md").read_text(), end="")
  print(f"wrote {workdir}/secure.md, secure.csv, secure.png")


if __name__ == "__main__":
  app.run(main)
