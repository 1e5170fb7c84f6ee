"""Train a model privately.

  python -m launch.train --config=configs/quickstart.py --workdir=runs/quickstart
  python -m launch.train --config=configs/mnist_scatter_linear.py --workdir=runs/mnist \\
    --config.privacy.epsilon=2 --config.seed=1

Every field of the config (dpjax/experiments/kinds/central/config.py) can be overridden by its
dotted name. The run writes to --workdir: config.json, metrics.jsonl, tensorboard/, result.json,
report.png and .csv, params.npz (the model), inputs.json (what launch.serve needs to know of the
data, all public), checkpoints/ (holds the noise key: secret).
Stop it at any time; the same command goes on where it stopped.

--audit trains with canaries and adds epsilon_audited_lower to result.json: a lower bound
on the true epsilon, and what perfect scores would show. If it is above the proved epsilon, or
guesses are too good for the proof, the exit code is 1.
--dry_run prints the plan and ends: epsilon, noise, sampler, steps, minutes and memory (estimates,
from a few steps on zeros). It refuses what the run would refuse, and writes nothing.
With --target=tpu:v5e:2x4 or gpu:h100:8 the step is compiled for that machine, which need not be
there. The plan then says whether the step fits, its memory, what devices send, and how many hours
all steps take at least.
--config.release=true takes keys of 256 bits, rounds noise to a grid, and logs nothing private.

Several accelerators share every batch with --config.mesh=data:8. On several machines, or in
several processes of one, run the same command with another --process_id in each:

  python -m launch.train --config=configs/mnist_cnn.py --workdir=runs/many \\
    --config.mesh=data:16 --coordinator=10.0.0.1:9000 --num_processes=2 --process_id=0

Each holds the data. Process 0 listens at --coordinator, writes and prints. If a process dies,
or hangs for --peer_timeout seconds, JAX ends the others, and their last line says what is saved.
The same commands go on from the last checkpoint of process 0's --workdir, on as many devices
and processes as there are. The connections are neither encrypted nor authenticated: for
networks that are trusted.
"""

from launch import app, main

main.define("train", default="configs/quickstart.py")

if __name__ == "__main__":
  app.run(main.main)
