"""Runs a sweep: a curve of accuracy over epsilon from one command.

  python -m launch.sweep --config=configs/sweeps/quickstart.py --workdir=runs/sweep

  # a private selection: a random number of runs, of which the best is released and accounted for
  python -m launch.sweep --config=configs/sweeps/learning_rate.py --workdir=runs/best \\
    --config.selection=best --config.selection.mean_trials=10

The config file yields (name, config) of each run in get_configs(). What its get_config() returns,
mostly a Sweep (dpjax/experiments/sweeps/sweep.py), can be overridden by dotted names, such as
--config.seeds=[0,1,2], --config.epsilons=[1,4] or --config.base.num_steps=300. Runs may be of any
kind. Writes to --workdir: sweep.json, curve.csv, curve.png, table.md, points/; after the last run
curve.pdf and curve.svg, for a paper (launch.plot draws them again). Stop it at any time; the same
command goes on where it stopped. Exit code 1 if one of its runs failed, or if an audit refuted the
claim of a run. A private selection writes best/ (to be released), trials.json and trials/ (both
secret).
Several of the same command, in several terminals or on several machines that share the folder, work
off one sweep together. It helps runs that leave cores idle, as those of small convolutional
networks do; each process holds the data.
--only='CNN @ *' runs the runs of that name alone; the same command without it goes on.
--dry_run prints the plan and ends: runs, epsilon of each and of all together, minutes and memory
(estimates, from a few steps on zeros); it writes nothing.
--print_commands prints one command for each run, for a job array or xargs.
"""

from launch import app, main

main.define("sweep", default=None)

if __name__ == "__main__":
  app.run(main.main)
