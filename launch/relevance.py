"""RADP and its relatives: as the paper claims them, and with a proof.

  python -m launch.relevance --config=configs/radp/quickstart.py --workdir=runs/radp \\
    --config.method=radp_rigorous
  python -m launch.relevance --config=configs/radp/test1_mnist.py --workdir=runs/test1 \\
    --config.seeds=[0,1,2] --config.base.num_epochs=40

Every field of the config (dpjax/experiments/kinds/relevance/config.py) can be overridden by its
dotted name, such as --config.num_epochs=5 --config.epsilon=1.
A run writes result.json, metrics.jsonl, params.npz, heat_maps.png to --workdir.
get_configs() of the file makes a list of runs: --only='RADP*' runs a part. They write these under
points/, and sweep.json: all runs, and what they cost together.
Always: report.png and .csv (test accuracy and loss by epoch) and
claims.csv and .md: what is claimed, what is proved, what an attack shows (--audit), and
the accuracy. checkpoints/ in a run's folder holds a digest of its data: keep it as secret as
the data. Stop it at any time; the same command goes on where it stopped.
Exit code 1 if one of several runs failed, or an attack refutes a PROVED epsilon.
--dry_run prints the plan and ends: runs, epsilon of each and of all together, minutes and memory
(estimates, from a few steps on zeros, without the attacks of --audit); it writes nothing.
"""

from launch import app, main

main.define("relevance", default="configs/radp/quickstart.py")

if __name__ == "__main__":
  app.run(main.main)
