"""What `test_mesh.py` asks of eight devices, in one program: prints JSON.

  XLA_FLAGS=--xla_force_host_platform_device_count=8 python -m tests.core.training.mesh_program

With `more`, whole runs, and every kind of noise and clipping, over meshes and on one device.
"""

import json
import pathlib
import shutil
import sys
import tempfile
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from dpjax import data, gradients, noise, training, transforms
from dpjax.experiments.config import fields
from dpjax.experiments.kinds.central import build
from dpjax.experiments.kinds.central.config import TrainConfig
from dpjax.experiments.run import checkpoint, loop, workdir, writers
from dpjax.gradients import per_example
from dpjax.gradients.device_mesh import mesh_of, split_rows
from dpjax.noise import source
from dpjax.noise.correlated import BandedToeplitz
from dpjax.parallel.collectives import collectives
from dpjax.parallel.exchanges import is_first
from dpjax.parallel.spanning import own_copy
from dpjax.plan import Plan
from dpjax.sampling import CyclicSampler, PoissonSampler
from dpjax.training.dp_sgd import noise_state
from tests.runs.stops import on_save

LAYOUTS = (None, "data:8", "data:4,model:2")
SIZE, IDLE = 40, 2  # examples; columns that are 0 for everybody
SLOTS = 27  # of a batch: neither 4 nor 8 divides it
_MOVES = ("data:8", "data:8", None, "data:4,model:2")  # the mesh of each step of one run


def dataset():
  rng = np.random.default_rng(0)
  x = rng.normal(size=(SIZE, 6)).astype(np.float32)
  x[:, :IDLE] = 0  # the weights of these columns see noise alone
  return data.from_arrays(x, rng.integers(0, 4, SIZE), num_classes=4, nominal_size=SIZE)


def config(mesh):
  small = {
    "data.name": "digits",
    "model.name": "linear",
    "num_steps": 4,
    "eval_every": 4,
    "checkpoint_every": 1,
    "privacy.epsilon": None,
    "privacy.noise_multiplier": 1.0,
    "privacy.accountant": "rdp",
    "privacy.sampling_prob": 0.2,
    "privacy.sampler.capacity": SLOTS,
    "privacy.delta": 1e-1,
    "noise_seed": 0,
  }
  return fields.replace_all(TrainConfig(mesh=mesh), small)


def _plain(leaf):
  is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
  return jax.random.key_data(leaf) if is_key else leaf


def _told(tree):
  leaves = jax.tree.leaves(own_copy(tree))
  return [np.asarray(_plain(leaf)).tolist() for leaf in leaves]


def exchanged(compiled):
  return [[c.kind, c.arrays, c.group] for c in collectives(compiled.as_text())]


# --- the steps of a run, moved from mesh to mesh by its checkpoints


class _Steps:
  """What a run of `launch.train` computes, on one layout."""

  def __init__(self, layout):
    both = dataset(), dataset()
    self.run = build.assemble(config(layout), both)
    self.phase = build.phase(config(layout), self.run)
    self.batches = [next(slices) for slices in self.phase.draws(0)]
    self.first, step = self.phase.init(), jax.jit(self.run.algorithm.step)
    self.step = step.lower(self.first, self.batches[0]).compile()

  def facts(self):
    state = self.first
    for batch in self.batches:
      state, info = self.step(state, batch)
    rows = lambda leaf: np.asarray(leaf)[:SLOTS].tolist()
    lies = lambda leaf: [leaf.shape, leaf.sharding.shard_shape(leaf.shape)]
    return {
      "params": _told(state.params),
      "noise": _told(noise_state(state)),
      "info": [float(value) for value in info],
      "scores": self.phase.evaluate(state),
      "drawn": [[rows(b.examples.x), rows(b.mask), int(sum(b.mask))] for b in self.batches],
      "rows on a device": self.batches[0].examples.x.sharding.shard_shape((32, 6)),
      "lies": [lies(leaf) for leaf in jax.tree.leaves((state.params, state.opt_state))],
      "exchanged": exchanged(self.step),
      "digest": workdir.config_digest(config(None)),
      "epsilon": self.run.guarantee.curve(4),
    }


def _moved(steps):
  """The parameters of a run that is saved, and goes on elsewhere, after each step."""
  checkpoints = checkpoint.Checkpoints(pathlib.Path(tempfile.mkdtemp()))
  checkpoints.save(0, steps[_MOVES[0]].first, {})
  for number, layout in enumerate(_MOVES):
    now = steps[layout]
    state, _ = checkpoints.restore(now.first)
    state, _ = now.step(state, now.batches[number])
    checkpoints.save(number + 1, state, {})
  return {"params": _told(state.params), "noise": _told(noise_state(state))}


def _steps():
  steps = {layout: _Steps(layout) for layout in LAYOUTS}
  return {str(name): each.facts() for name, each in steps.items()} | {
    "moved": _moved(steps)
  }


# --- planted bugs: what each device does with its own share


def _noisy(fn):
  """Noise on every device, before the sums are joined."""

  def wrapped(params, batch, mask):
    out = fn(params, batch, mask)
    key = jax.random.fold_in(jax.random.key(7), lax.axis_index("data"))
    extra = jax.tree.map(jnp.add, out.total, source.gaussian(key, out.total, 0.5))
    return out._replace(total=extra)

  return wrapped


def _summed_twice(fn):
  """The right numbers, by a second sum over the devices."""

  def wrapped(params, batch, mask):
    out = fn(params, batch, mask)
    mean = jax.tree.map(lambda t: lax.psum(t, "data") / 8, out.total)
    return out._replace(total=lax.pcast(mean, ("data",), to="varying"))

  return wrapped


def _gathered(fn):
  """The right numbers, from rows that have been to every device."""

  def own(leaf):
    rows, whole = leaf.shape[0], lax.all_gather(leaf, "data", tiled=True)
    return lax.dynamic_slice_in_dim(whole, lax.axis_index("data") * rows, rows)

  return lambda params, batch, mask: fn(params, own(batch), mask)


def _plants():
  """The sum of clipped gradients, wrong and right."""
  rng = np.random.default_rng(2)
  batch = rng.normal(size=(32, 3)).astype(np.float32), np.ones(32, bool)
  loss_fn, original = lambda w, x: jnp.sum((w - x) ** 2), per_example.over_devices
  bugs = {"noise": _noisy, "sent": lambda fn: _summed_twice(_gathered(fn))}
  found = {}
  for name, bug in bugs.items():
    mesh = jax.make_mesh((8,), ("data",))  # as users make it
    wrong = lambda fn, *rest, **named: original(bug(fn), *rest, **named)
    grad_fn = gradients.clipped_grad(loss_fn, l2_clip_norm=1.0, method="vmap", mesh=mesh)
    with mock.patch.object(per_example, "over_devices", wrong):
      step = jax.jit(grad_fn).lower(jnp.zeros(3), *batch).compile()
    total = step(jnp.zeros(3), *batch).total
    found[name] = {"total": total.tolist(), "exchanged": exchanged(step)}
  grad_fn = gradients.clipped_grad(loss_fn, l2_clip_norm=1.0, method="vmap")
  return found | {"one": {"total": grad_fn(jnp.zeros(3), *batch).total.tolist()}}


# --- a loss with a loop


def _recurrent(params, x):
  """A loop that begins from zeros, as a recurrent cell does."""

  def cell(carry, row):
    return jnp.tanh(params["w"] @ carry + row), None

  last, _ = lax.scan(cell, jnp.zeros(3), x)
  return jnp.sum(last * params["w"])


def _loops():
  """The sum of clipped gradients of a loop, on one device and on a mesh as users make it."""
  x = np.random.default_rng(4).normal(size=(16, 5, 3)).astype(np.float32)
  params, mesh = {"w": jnp.eye(3)}, jax.make_mesh((8,), ("data",))
  found = {}
  for method in ("vmap", "ghost"):
    one = gradients.clipped_grad(_recurrent, l2_clip_norm=1.0, method=method)
    many = gradients.clipped_grad(_recurrent, l2_clip_norm=1.0, method=method, mesh=mesh)
    rows = split_rows(mesh, (x, np.ones(16, bool)))
    found[method] = [
      jax.jit(one)(params, x, True).total["w"].tolist(),
      jax.jit(many)(params, *rows).total["w"].tolist(),
    ]
  return found


# --- more: whole runs


class _Enough(Exception):
  pass


def until(last, mesh, folder, copies=None):
  """Trains on a mesh up to a checkpoint, or to the end (None).

  Args:
    copies: {step: where its folder is copied to when that step is saved}.
  """

  def saved(step):
    if step in (copies or {}) and is_first():
      ignored = shutil.ignore_patterns(writers.LOCK)
      shutil.copytree(folder, copies[step], ignore=ignored)
    if step == last:
      raise _Enough

  try:
    with on_save(saved):
      return loop.train(config(mesh), folder, data=(dataset(), dataset()))
  except _Enough:
    return None


def _runs():
  found, kept = {}, ("epsilon", "ledger", "device", "mesh", "test_accuracy", "num_steps")
  parts = {
    "straight": [(None, None)],
    "moved": [(2, "data:8"), (3, None), (None, "data:4,model:2")],
  }
  for name, legs in parts.items():
    folder = pathlib.Path(tempfile.mkdtemp()) / "run"
    result = [until(last, mesh, folder) for last, mesh in legs][-1]
    assert result is not None and until(None, None, folder) == result
    with np.load(folder / "params.npz") as params:
      arrays = [params[key].tolist() for key in sorted(params)]
    found[name] = {key: result.get(key) for key in kept} | {"params": arrays}
  return found


def audited(mesh, folder):
  """What runs with canaries report, of each kind of them."""
  found = {}
  for kind, score in (("mislabelled", "loss"), ("gradient", "sums")):
    changes = {"num_canaries": 10, "kind": kind, "score": score}
    named = {"audit": "canaries"} | {
      f"audit.{name}": value for name, value in changes.items()
    }
    settings = fields.replace_all(config(mesh), named)
    result = loop.train(settings, folder / kind, data=(dataset(), dataset()))
    found[kind] = result["audit"]
  return found


# --- more: every kind of noise and clipping


def _params():
  rng = np.random.default_rng(1)
  shapes = {"first": (6, 10), "bias": (10,), "second": (10, 4)}
  return {k: jnp.asarray(rng.normal(size=s), jnp.float32) for k, s in shapes.items()}


def _loss(params, example):
  x = example.x * jax.random.uniform(example.key)  # what each example draws for itself
  logits = jnp.tanh(x @ params["first"] + params["bias"]) @ params["second"]
  return optax.softmax_cross_entropy_with_integer_labels(logits, example.y)


def _ran(layout, plan, **options):
  mesh = None if layout is None else mesh_of(layout)
  given = {"noise_key": jax.random.key(7), "example_key": jax.random.key(8), "mesh": mesh}
  init, step = training.dp_sgd(_loss, plan, optax.sgd(0.5, 0.9), **given | options)
  state, step = init(_params()), jax.jit(step, donate_argnums=0)
  for batch in plan.batches(dataset(), rng=3):
    placed = batch if mesh is None else split_rows(mesh, batch)
    state, info = step(state, placed)
  sent = exchanged(step.lower(state, placed).compile())
  facts = {"params": _told(state.params), "info": [float(value) for value in info]}
  return facts | {"exchanged": sent, "ema": _told(state.ema)}


def kinds(layouts=LAYOUTS):
  numbers = {"noise_multiplier": 1.0, "l2_clip_norm": 0.5, "normalize_by": 8}
  numbers |= {"sampler": PoissonSampler(0.2, SLOTS), "num_steps": 3, "delta": 1e-1}
  secret = source.key_from_bytes(bytes(range(32)))
  banded = noise.NoiseShape(correlation=BandedToeplitz.optimized(num_steps=3, bands=2))
  cyclic = {
    "sampler": CyclicSampler(steps_per_pass=4, num_examples=SIZE),
    "noise_shape": banded,
  }
  clip, adaptive = gradients.Clip, transforms.AdaptiveClipping()
  groups = {"first": 0.3, "bias": 0.2, "second": 0.1}
  cases = {
    "microbatches": ({}, {"microbatch_size": 1}),
    "vmap": ({}, {"method": "vmap", "ema_decay": 0.9}),
    "memory": ({}, {"memory_budget": 4e3}),
    "slices": ({"slices": 2}, {}),
    "release": ({}, {"noise_key": secret}),
    "automatic": ({"l2_clip_norm": clip(0.5, "automatic")}, {}),
    "adaptive": ({"l2_clip_norm": clip(0.5, adaptive)}, {}),
    "schedule": ({"l2_clip_norm": clip(0.5, schedule=(1.0, 0.5, 0.25))}, {}),
    "groups": ({"l2_clip_norm": groups}, {}),
    "correlated": (cyclic, {}),
  }
  found = {}
  for name, (changes, options) in cases.items():
    plan = Plan(**numbers | changes)
    found[name] = {str(layout): _ran(layout, plan, **options) for layout in layouts}
    print(f"done: {name}", file=sys.stderr, flush=True)
  return found


if __name__ == "__main__":
  assert jax.device_count() == 8
  more = sys.argv[1:] == ["more"]
  parts = {"runs": _runs, "kinds": kinds} if more else {"steps": _steps, "plants": _plants}
  parts |= {} if more else {"loops": _loops}
  print(json.dumps({name: part() for name, part in parts.items()}))
