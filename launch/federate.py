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
and prints; the result is that of one process. If a process dies the others say so, within
seconds (if it hangs, after --peer_timeout), and end with exit code 1; the same commands go on
from the last checkpoint of process 0's --workdir. The connections are neither encrypted nor
authenticated: for networks that are trusted.
"""

from __future__ import annotations

from absl import flags

from dpjax.experiments.kinds.federated import build, secure_sums
from dpjax.experiments.kinds.federated.kind import FEDERATED
from dpjax.experiments.run import config_names, guarantee, writers
from launch import app, config_flag, peers

config_flag.define(kind=FEDERATED, default="configs/fed/quickstart.py")
flags.DEFINE_string(
  "workdir", None, "Directory of this run (default: runs/fed_<config name>)."
)
flags.DEFINE_bool(
  "audit", False, "Train with canary clients; short for --config.audit=canaries."
)
app.define_dry_run()
app.define_target()
peers.define()


def line(result: dict) -> str:
  """Returns one line about a finished run: its scores, guarantee, rounds and time, and the round at
  which each target accuracy was reached."""
  reached = [
    f"{float(target):.0%} in {rounds}"
    for target, rounds in result["rounds_to_accuracy"].items()
    if rounds is not None
  ]
  return (
    f"{result['dataset']} {result['model']} {result['method']}, {result['num_clients']} "
    f"clients: {writers.headline(result)}, {guarantee.summary(result)}"
    f"{secure_sums.in_words(result)}, {result['num_steps']} rounds{writers.took(result)}"
    f"{'; ' + ', '.join(reached) if reached else ''}"
  )


def main() -> None:
  with app.as_targeted():
    config, workdir = config_flag.asked("fed_")
  digest = config_names.digest(config, build.ELSEWHERE)
  peers.carry_out(
    FEDERATED,
    config,
    workdir,
    # The digest covers only the computation. Checkpoints also depend on where client state is kept.
    {"config": digest.hex(), "client_state": config.client_state},
    line,
    "round",
  )


if __name__ == "__main__":
  app.run(main)
