"""Compute on data that nobody sees: sums, regression and inference, against the same in the clear.

  python -m launch.secure --config=configs/secure/quickstart.py --workdir=runs/secure
  python -m launch.secure --config=configs/secure/quickstart.py --workdir=runs/three \\
    --alone --config.task.silent=3

Every field of the config (dpjax/experiments/kinds/secure/config.py) can be overridden by its
dotted name. get_configs() of the file makes a table of it: --only='sum, *' runs a part, --alone the
config by itself.
Writes to --workdir: secure.md and secure.csv (task, protocol, sizes, seconds, bytes, error
against plain, what is hidden from whom), secure.png, sweep.json, points/ (one folder for each
row). Stop it at any time; the same command goes on where it stopped (a sum or a regression is
one step, and a stop waits for its end). Exit code 1 if one of several rows failed. Rows whose
extra is not installed (pip install -e '.[secure,he]') are left out, and named first. All parties
run on this machine: the command measures, and keeps no secret from you.
"""

from launch import app, main

main.define("secure", default="configs/secure/quickstart.py")

if __name__ == "__main__":
  app.run(main.main)
