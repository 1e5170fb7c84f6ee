"""What `test_hosts.py` asks of two processes with four devices each, in one program.

  python -m tests.core.training.hosts_program PORT FOLDER

Forks after the imports, as these take longest; process i writes FOLDER/i.json. FOLDER/down is a
run that one device has begun; what they have of it after a step more goes to FOLDER/up. With
`more`, audits and every kind of noise and clipping.
"""

import dataclasses
import json
import os
import pathlib
import sys

import jax
import numpy as np

from dpjax import gradients
from dpjax.data import resident
from dpjax.experiments.config import fields
from dpjax.experiments.run import dry_run, loop
from dpjax.experiments.run.kind import experiment_of
from dpjax.experiments.sweeps import sweep
from dpjax.gradients.device_mesh import mesh_of, on_all, split_rows
from dpjax.parallel import runtime
from dpjax.validate import UserError
from tests import pinned
from tests.core.training import mesh_program

ROWS = np.arange(20, 20 - mesh_program.SLOTS, -1) % mesh_program.SIZE  # of a batch
_MESHES = "data:8", "data:4,model:2"


def _start(port, index):
  where = {"num_processes": 2, "process_id": index, "timeout": 100.0}
  runtime.start(
    f"127.0.0.1:{port}", local_devices=[0, 1, 2, 3], same={"config": "x"}, **where
  )
  assert (jax.process_count(), jax.device_count()) == (2, 8)


def _rows(leaf):
  """What lies on this process's devices, by row."""
  held = {}
  for part in leaf.addressable_shards:
    held |= dict(enumerate(np.asarray(part.data).tolist(), part.index[0].start or 0))
  return held


def _gathered():
  """Rows of a batch that this process holds, and what gathering them sends."""
  mesh = mesh_of("data:8")
  split = lambda tree: split_rows(mesh, tree)
  everywhere = on_all(mesh)
  held = resident.resident(mesh_program.dataset(), everywhere=everywhere, split=split)
  taken = held._take.lower(held._arrays, ROWS).compile()
  return {"rows": _rows(held[ROWS].x), "sent": mesh_program.exchanged(taken)}


def _other_data(index):
  changed = mesh_program.dataset()
  x = changed.x.copy()
  x[7, 3] += index
  return dataclasses.replace(changed, x=x)


_BY_SEED = sweep.Sweep(x="seed", y="test_accuracy")


def _line(call):
  """In which a call is refused."""
  try:
    call()
  except UserError as error:
    return str(error)
  return "goes on"


def _refused(folder, index):
  of = lambda mesh, **changes: fields.replace_all(mesh_program.config(mesh), changes)
  both = mesh_program.dataset(), mesh_program.dataset()
  check = lambda config: experiment_of(config).check()
  run = lambda config, loaded=both: loop.train(config, folder / "no", data=loaded)

  def alone():
    experiment = experiment_of(of("data:8"))
    experiment.over_processes = False
    loop.run(experiment, folder / "no", data=both)

  half = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("data",))
  calls = {
    "no mesh": lambda: run(of(None)),
    "odd mesh": lambda: check(of("data:3")),
    "large mesh": lambda: check(of("data:10")),
    "across": lambda: check(of("data:1,model:8")),
    "half": lambda: gradients.clipped_grad(lambda w, x: w, l2_clip_norm=1.0, mesh=half),
    "release": lambda: run(of("data:8", release=True, noise_seed=None)),
    "data": lambda: run(of("data:8"), (_other_data(index), both[1])),
    "kind": alone,
    "plan": lambda: dry_run.report(experiment_of(of("data:8")), folder / "no"),
    "sweep": lambda: sweep.run([("a run", of("data:8"))], folder / "no", _BY_SEED),
  }
  return {name: _line(call) for name, call in calls.items()}


def _facts(folder, index):
  return {
    **_gathered(),
    "ended": mesh_program.until(
      None, "data:4,model:2", folder / "down", copies={3: folder / "up"}
    ),
    "refused": _refused(folder, index),
  }


def _more(folder, index):
  """Audits, every kind of noise and clipping."""
  return {
    "audits": mesh_program.audited("data:8", folder),
    "kinds": mesh_program.kinds(_MESHES),
  }


if __name__ == "__main__":
  pinned.pin()  # FOLDER/down was begun by a test
  port, folder = int(sys.argv[1]), pathlib.Path(sys.argv[2])
  second = os.fork()
  me = 0 if second else 1
  _start(port, me)
  asked = _more if sys.argv[3:] == ["more"] else _facts
  (folder / f"{me}.json").write_text(json.dumps(asked(folder, me)))
  jax.distributed.shutdown()
  sys.exit(os.waitstatus_to_exitcode(os.waitpid(second, 0)[1]) if second else 0)
