"""One party of test_spu_parties.py: a process of its own. Arguments: a dictionary as JSON."""

import json
import sys

import jax
import numpy as np

from dpjax.secure.mpc import spu_parties
from dpjax.validate import UserError


def data(rank):
  """What party `rank` alone holds: features (0) or weights and labels (1)."""
  rng = np.random.default_rng(rank)
  if rank == 0:
    return rng.normal(size=(32, 5)).astype(np.float32)
  return np.zeros(5, np.float32), (rng.random(32) < 0.5).astype(np.float32)


def step(x, held):
  w, y = held
  loss = lambda w: (jax.nn.softplus(x @ w) - y * (x @ w)).mean()
  return w - 0.5 * jax.grad(loss)(w)


def main(task):
  rank = task["rank"]
  shapes = jax.tree.map(
    lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), [data(0), data(1)]
  )
  args = [data(p) if p == rank else shapes[p] for p in (0, 1)]
  files = task["certificates"]
  settings = {"protocol": task["protocol"], "timeout_seconds": task.get("timeout", 120)}
  if files:
    settings["certificates"] = spu_parties.Certificates(*files[rank])
  with spu_parties.connect(task["addresses"], rank, **settings) as us:
    out = us.run(step, *args, owners=(0, 1), reveal_to=task["reveal_to"])
  return out.tolist() if isinstance(out, np.ndarray) else f"{out.shape} {out.dtype}"


if __name__ == "__main__":
  try:
    print("RESULT " + json.dumps(main(json.loads(sys.argv[1]))), flush=True)
  except UserError as error:
    print("ERROR " + str(error), flush=True)
