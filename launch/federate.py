"""Train over many clients, privately for each user.

  python -m launch.federate --config=configs/fed/quickstart.py --workdir=runs/fed
  python -m launch.federate --config=configs/fed/mnist_iid.py --workdir=runs/mnist_iid \\
    --config.algorithm=fed_prox --config.seed=1

Every field of the config (dpjax/experiments/kinds/federated/config.py) can be overridden by its
dotted name. Clients run in a loop on a CPU (convolutions in a thread per core), under vmap on
one accelerator and under shard_map on several; --config.execution, --config.num_threads and
--config.num_devices choose. --config.release=true takes keys of 256 bits, rounds noise to a grid,
and logs nothing private. The run writes to --workdir:
config.json, metrics.jsonl, tensorboard/, result.json, report.png and .csv, params.npz (the
model), checkpoints/ (holds the noise key: secret). Stop it at any time; the same command goes
on where it stopped.

--audit puts canary clients into the federation and adds epsilon_audited_lower to result.json: a
lower bound on the true epsilon of a user, and what perfect scores would show. The audit reads what
the guarantee speaks of: sums, each client's message (local), or decoded sums (distributed). If the
bound is above the proved epsilon, or guesses are too good for the proof, the exit code is 1.

--dry_run prints the plan and ends: epsilon, noise, sampler, rounds, minutes and memory
(estimates, from a few rounds on zeros); it writes nothing. With --target=tpu:v5e:2x4 or gpu:h100:8
the clients' program is compiled for that machine, which need not be there.

On several machines, or several processes of one, each runs its share of every cohort:

  python -m launch.federate --config=configs/fed/mnist_iid.py --workdir=runs/many \\
    --coordinator=10.0.0.1:9000 --num_processes=2 --process_id=0   # there: 1, and so on

with the same command on all but for --process_id. Process 0 listens at --coordinator, writes
and prints; the result is that of one process. If a process dies, or hangs for --peer_timeout
seconds, JAX ends the others, and their last line says what is saved. The same commands go on
from the last checkpoint of process 0's --workdir. The connections are neither encrypted nor
authenticated: for networks that are trusted.
"""

from launch import app, main

main.define("federate", default="configs/fed/quickstart.py")

if __name__ == "__main__":
  app.run(main.main)
