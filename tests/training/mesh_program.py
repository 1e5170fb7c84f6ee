"""What `test_mesh.py` asks of eight devices, in one program: prints JSON.

  XLA_FLAGS=--xla_force_host_platform_device_count=8 python -m tests.training.mesh_program

With `more`, every kind of noise and clipping over a mesh against one device.
"""

import contextlib
import json
import pathlib
import sys
import tempfile
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from dpjax import data, gradients, noise, training, transforms
from dpjax.benchmarks.collectives import collectives
from dpjax.gradients import per_example
from dpjax.noise.correlated import Banded
from dpjax.plan import Plan
from dpjax.runs import checkpoint, loop
from dpjax.runs.central import build
from dpjax.runs.central.config import TrainConfig
from dpjax.sampling import CyclicSampler, PoissonSampler
from dpjax.schema import fields

LAYOUTS = ("data:8", "data:4,model:2")
SIZE, SLOTS, IDLE = 40, 27, 2  # examples, rows of a batch, columns that are 0 for everybody
_PLAN = {
  "sampler": PoissonSampler(prob=0.2, capacity=SLOTS),
  "noise_multiplier": 1.0,
  "l2_clip_norm": 0.5,
  "normalize_by": 8,
  "num_steps": 3,
  "delta": 1e-1,
}


def _dataset():
  rng = np.random.default_rng(0)
  x = rng.normal(size=(SIZE, 6)).astype(np.float32)
  x[:, :IDLE] = 0  # the weights of these columns see noise alone
  return data.from_arrays(x, rng.integers(0, 4, SIZE), num_classes=4)


def _params():
  rng = np.random.default_rng(1)
  shapes = {"first": (6, 10), "bias": (10,), "second": (10, 4)}
  return {k: jnp.asarray(rng.normal(size=s), jnp.float32) for k, s in shapes.items()}


def _loss(params, example):
  x = example.x
  if example.key is not None:  # what each example draws for itself
    x = x * jax.random.uniform(example.key)
  logits = jnp.tanh(x @ params["first"] + params["bias"]) @ params["second"]
  return optax.softmax_cross_entropy_with_integer_labels(logits, example.y)


def _mesh(layout):
  return None if layout is None else gradients.mesh_of(layout)


def _compiled(layout, plan, **options):
  """(first state, compiled step, its batches) of a run over a mesh."""
  mesh, dataset = _mesh(layout), _dataset()
  given = {"noise_key": jax.random.key(7), "example_key": jax.random.key(8), "mesh": mesh}
  init, step = training.dp_sgd(_loss, plan, optax.sgd(0.5, 0.9), **given | options)
  placed, split = {}, lambda batch: batch
  if mesh is not None:
    split = lambda batch: gradients.split_rows(mesh, batch)
    placed = {"everywhere": gradients.on_all(mesh), "split": split}
  kept = data.resident(dataset, **placed)
  batches = [split(batch) for batch in plan.batches(kept, rng=3)]
  state = init(_params())
  return state, jax.jit(step).lower(state, batches[0]).compile(), batches


def _ran(layout, plan, **options):
  import time
  t=time.process_time()
  state, step, batches = _compiled(layout, plan, **options)
  print(layout, options, "compiled", time.process_time()-t, file=sys.stderr)
  info = None
  for batch in batches:
    state, info = step(state, batch)
  rows = lambda leaf: np.asarray(leaf)[: SLOTS // plan.slices + 1].tolist()
  # wherever they lie: whether the padding of a mesh is masked shows in the size
  drawn = [[rows(b.examples.x), int(np.asarray(b.mask).sum())] for b in batches]
  return {
    "params": _told(state.params),
    "key": np.asarray(jax.random.key_data(training.noise_state(state).key)).tolist(),
    "info": [float(value) for value in info],
    "drawn": drawn[: plan.slices],
    "exchanged": [[c.kind, c.arrays, c.group] for c in collectives(step.as_text())],
    "lies": [_lies(leaf) for leaf in jax.tree.leaves((state.params, state.opt_state))],
    "state": _told(jax.tree.map(_plain, state.opt_state)),
  }


def _plain(leaf):
  return (
    jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
  )


def _told(tree):
  return [np.asarray(leaf).tolist() for leaf in jax.tree.leaves(tree)]


def _lies(leaf):
  """(shape, shape on each device)"""
  return [leaf.shape, leaf.sharding.shard_shape(leaf.shape)]


# --- planted bugs: what each device does with its own share


def _noisy(fn):
  """Noise on every device, before the sums are joined."""

  def wrapped(params, batch, mask):
    out = fn(params, batch, mask)
    key = jax.random.fold_in(jax.random.key(7), lax.axis_index("data"))
    extra = noise.gaussian(key, out.total, 0.5)
    total = jax.tree.map(jnp.add, out.total, extra)
    return _with_total(out, total)

  return wrapped


def _summed_twice(fn):
  """The right numbers, by a second sum over the devices."""

  def wrapped(params, batch, mask):
    out = fn(params, batch, mask)
    mean = jax.tree.map(lambda t: lax.psum(t, "data") / 8, out.total)
    return _with_total(out, lax.pcast(mean, ("data",), to="varying"))

  return wrapped


def _gathered(fn):
  """The right numbers, from rows that have been to every device."""

  def wrapped(params, batch, mask):
    own = lambda leaf: lax.dynamic_slice_in_dim(
      lax.all_gather(leaf, "data", tiled=True) * 1,
      lax.axis_index("data") * leaf.shape[0],
      leaf.shape[0],
    )
    return fn(params, batch._replace(x=own(batch.x)), mask)

  return wrapped


def _with_total(out, total):
  bounds = out.l2_bound, out.group_bounds
  return type(out)(total, out.norms, out.losses, *bounds, out.mask)


PLANTS = {"noise": _noisy, "second sum": _summed_twice, "gather": _gathered}


@contextlib.contextmanager
def _planted(bug):
  original = per_example.over_devices
  wrong = lambda fn, *rest: original(bug(fn), *rest)
  with mock.patch.object(per_example, "over_devices", wrong):
    yield


def _steps():
  plan = Plan(**_PLAN)
  found = {str(layout): _ran(layout, plan) for layout in (None, *LAYOUTS)}
  for name, bug in PLANTS.items():
    with _planted(bug):
      found[name] = _ran("data:8", plan, method="vmap")
  return found


# --- runs


def _config(mesh):
  small = {
    "data.name": "digits",
    "model.name": "linear",
    "num_steps": 6,
    "eval_every": 6,
    "checkpoint_every": 2,
    "privacy.epsilon": None,
    "privacy.noise_multiplier": 1.0,
    "privacy.accountant": "rdp",
    "privacy.sampling_prob": 0.2,
    "privacy.capacity": 33,
    "privacy.delta": 1e-2,
  }
  return fields.replace_all(TrainConfig(mesh=mesh), small)


class _Enough(Exception):
  pass


def _until(last, mesh, folder):
  """Trains on a mesh up to a checkpoint, or to the end."""

  def on_save(step):
    if step == last and step != begun:
      raise _Enough

  begun = checkpoint.newest(folder)
  both = _dataset(), _dataset()
  try:
    return loop.run(build.build(_config(mesh), both), folder, on_save=on_save)
  except _Enough:
    return None


def _runs():
  found, kept = {}, ("epsilon", "ledger", "device", "mesh", "test_accuracy", "num_steps")
  parts = {
    "straight": [(None, None)],
    "moved": [(2, "data:8"), (4, None), (None, "data:4,model:2")],
  }
  for name, legs in parts.items():
    folder = pathlib.Path(tempfile.mkdtemp()) / "run"
    with mock.patch.object(loop.report, "train_report"):
      import time
      t=time.process_time()
      result = [_until(last, mesh, folder) for last, mesh in legs][-1]
      again = loop.run(build.build(_config(None), (_dataset(), _dataset())), folder)
    print(name, time.process_time()-t, file=sys.stderr)
    assert result is not None and again["params_sha256"] == result["params_sha256"]
    params = np.load(folder / "params.npz")
    found[name] = {key: result.get(key) for key in kept} | {
      "params": {key: params[key].tolist() for key in params}
    }
  return found


# --- more


def _more():
  banded = noise.NoiseShape(correlation=Banded(bands=1))
  cyclic = CyclicSampler(SIZE, 8)
  clip = gradients.Clip
  cases = {
    "microbatches": ({}, {"microbatch_size": 1}),
    "vmap": ({}, {"method": "vmap", "ema_decay": 0.9}),
    "memory": ({}, {"memory_budget": 4e3}),
    "slices": ({"slices": 2}, {}),
    "release": ({}, {"noise_key": noise.source.key_from_bytes(bytes(range(32)))}),
    "automatic": ({"l2_clip_norm": clip(0.5, "automatic")}, {}),
    "adaptive": ({"l2_clip_norm": clip(0.5, transforms.AdaptiveClipping())}, {}),
    "schedule": ({"l2_clip_norm": clip(0.5, schedule=(1.0, 0.5, 0.25))}, {}),
    "groups": ({"l2_clip_norm": {"first": 0.3, "bias": 0.2, "second": 0.1}}, {}),
    "correlated": ({"sampler": cyclic, "noise_shape": banded}, {}),
  }
  found = {}
  for name, (numbers, options) in cases.items():
    plan = Plan(**_PLAN | numbers)
    of = lambda layout: _ran(layout, plan, **options)
    found[name] = {str(layout): of(layout) for layout in (None, *LAYOUTS)}
  return found


if __name__ == "__main__":
  assert jax.device_count() == 8
  import time
  t0 = time.process_time()
  parts = {"steps": _steps, "runs": _runs} if sys.argv[1:] != ["more"] else {"more": _more}
  print(json.dumps({name: part() for name, part in parts.items()}))
