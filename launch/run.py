"""Carry out a config of any kind: one run, or all runs that it describes.

  python -m launch.run --config=configs/quickstart.py --workdir=runs/quickstart
  python -m launch.run --config=configs/pate/quickstart.py --workdir=runs/pate --config.epsilon=1

The config says what is run: for a config of launch.train this is launch.train, and so on
(`launch.list configs` shows the launcher of each). A config may be of a kind of your own.
`dpjax run FILE.py` is the same. Every field can be overridden by its dotted name. Stop it at any
time; the same command goes on where it stopped.
"""

from __future__ import annotations

from launch import app, main

main.define("", default="")

if __name__ == "__main__":
  app.run(main.main, words=True)
