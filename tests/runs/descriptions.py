"""What a config builds, as a tree of plain values that two configs can be compared by.

Nothing is trained: calibration is replaced by its arguments, data by small arrays of the same
kind, and the constructors of the federated algorithms by a record of their call.
"""

import contextlib
import dataclasses
import functools
import hashlib
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import core

from dpjax import accounting, data, federated, secure, trees, validate
from dpjax.experiments.config import fields
from dpjax.experiments.kinds.central import audit as central_audit
from dpjax.experiments.kinds.central import (
  build,
  one_release,
  patch_features,
  scattering_features,
)
from dpjax.experiments.kinds.central.config import LeastSquares
from dpjax.experiments.kinds.federated import build as federate_build
from dpjax.training.dp_sgd import TrainState
from dpjax.types import Example
from dpjax.validate import UserError
from dpjax.zoo.datasets import digits, pfl, published, registry, shakespeare, tff
from dpjax.zoo.networks import patches, public_trunks, sentence_encoder
from dpjax.zoo.networks.scattering import opponent_colours

_KEY = jax.random.key(7)
_TREE = {"w": jnp.array([[0.5, -1.0], [2.0, 0.25]]), "b": jnp.array([0.1, -3.0])}
_STEPS = 4


class Call(NamedTuple):
  """A constructor and its arguments."""

  name: str
  args: tuple
  kwargs: tuple
  # The size of cohorts was checked in earnest before.
  min_clients = 1

  def drawn_by(self, plan: Any) -> Any:
    """Of an aggregator: the same, for the cohorts of a plan."""
    return Call("drawn_by", (self, plan), ())

  def round(self, state: Any, cohort: Any) -> Any:
    raise AssertionError(f"{self.name} is described, not run")


def plain(value: Any) -> Any:
  """Anything as comparable data; functions by what they do to fixed inputs."""
  if isinstance(value, optax.GradientTransformation):
    return ("optimizer", moves(value))
  if isinstance(value, Call):
    return (value.name, plain(value.args), plain(value.kwargs))
  if dataclasses.is_dataclass(value) and not isinstance(value, type):
    names = [field.name for field in dataclasses.fields(value)]
    return (type(value).__name__, [(n, plain(getattr(value, n))) for n in names])
  if isinstance(value, dict):
    return [(key, plain(value[key])) for key in value]
  if isinstance(value, (list, tuple)):
    return [plain(entry) for entry in value]
  if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
    return jax.random.key_data(value).tolist()
  if isinstance(value, (np.ndarray, jax.Array)):
    return digest(value)
  return repr(value) if not callable(value) else getattr(value, "__qualname__", "function")


def digest(array: Any) -> str:
  array = np.ascontiguousarray(array)
  return f"{array.shape} {hashlib.sha256(array.tobytes()).hexdigest()[:12]}"


@functools.cache
def _gradients(step: int) -> Any:
  rng = np.random.default_rng(step)
  return jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape)), _TREE)


def moves(tx: optax.GradientTransformation) -> list:
  """Where an optimizer goes in a few steps from fixed parameters, by fixed gradients."""
  params, state, found = _TREE, tx.init(_TREE), []
  for step in range(_STEPS):
    updates, state = tx.update(_gradients(step), state, params)
    params = optax.apply_updates(params, updates)
    found.append([np.asarray(leaf).tolist() for leaf in jax.tree.leaves(params)])
  return found


# --- what stands in for the slow parts


def _calibrated(make_event: Any, **options: Any) -> float:
  """A number that depends on everything that the calibration would depend on."""
  return _spent(make_event(1.5), **options)


def _stated(event: Any, **options: Any) -> str:
  return repr((event, sorted(options.items())))


def _spent(event: Any, **options: Any) -> float:
  text = repr((event, sorted(options.items())))
  word = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")
  return 1.0 + word / 2**32


def _nominal(name: str) -> int | None:
  """As published data sets, which are smaller here, declare it."""
  known = published.nominal_size(name)
  return None if known is None else len(_loaded(name, None, 80)[0])


@functools.cache
def _loaded(name: str, data_dir: Any, max_length: int) -> tuple[Any, Any]:
  if name == "digits":
    return digits.load_digits()
  text = name in ("imdb_reviews", "movie_reviews") or name.startswith("shakespeare")
  side, depth = (32, 3) if name in ("cifar10", "random_process") else (28, 1)
  word = hashlib.sha256(repr((name, data_dir)).encode()).digest()
  rng = np.random.default_rng(list(word))
  n, classes = 500 if depth == 3 else 2100, 2 if text else 10
  y = rng.integers(0, classes, n).astype(np.int32)
  if text:
    length = 64 if name.startswith("shakespeare_") else min(max_length, 300)
    x = rng.integers(1, 256, size=(n, length)).astype(np.int32)
  else:
    x = rng.random((n, side, side, depth), np.float32)
  made = data.Dataset(x, y, name, classes, "train", 256 if text else None)
  return made, dataclasses.replace(made, split="test")


def _chunks(x: Any, mirrored: bool = False, colours: str = "rgb") -> Iterator[np.ndarray]:
  """As many channels as scattering has, in a twinkling."""
  x = opponent_colours(x) if colours == "opponent" else x
  x = (x + x[:, :, ::-1]) / 2 if mirrored else x
  yield np.repeat(x[:, ::4, ::4], 81, axis=3)


def _of_images(x: Any, shape: tuple[int, ...], mirrored: bool) -> Iterator[np.ndarray]:
  """As many numbers as features have, from the pixels of each image in [0, 1]."""
  if not (x.min() >= 0 and x.max() <= 1):
    raise UserError("must hold images in [0, 1]; leave out data.center", field="x")
  x = ((x + x[:, :, ::-1]) / 2 if mirrored else x).reshape(len(x), -1)
  size = int(np.prod(shape[1:]))
  yield np.tile(x, (1, -(-size // x.shape[1])))[:, :size].reshape(shape)


def _trunk(x: Any, trunk: str, *, mirrored: bool = False) -> Iterator[np.ndarray]:
  return _of_images(x, public_trunks.trunk_shape(trunk, x.shape), mirrored)


def _patches(x: Any, network: Any, *, mirrored: bool = False) -> Iterator[np.ndarray]:
  return _of_images(x, patches.patch_shape(x.shape), mirrored)


def _sentences(x: Any, encoder: str) -> Iterator[np.ndarray]:
  """As many numbers as an embedding has, from the bytes of each text."""
  repeats = -(-384 // x.shape[1])
  yield np.tile(x / np.float32(256), (1, repeats))[:, :384]


def _roles(data_dir: Any, *, min_chars: Any = None) -> tuple[Any, Any]:
  dataset = _loaded("shakespeare", data_dir, 80)[0]
  size = 7 if min_chars is None else 6
  indices = np.split(np.arange(len(dataset)), len(dataset) // size)
  made = data.Federation(dataset, indices, nominal_users=len(indices))
  return made, made


def _writers(name: Any, data_dir: Any, *, num_classes: int, max_examples: Any, **_: Any):
  made = _loaded(name, data_dir, 0)[0]
  made = made.subset(np.arange(3 * len(made)) % len(made))
  owners = np.arange(len(made)) // 3  # nearly as many as the config declares
  dataset = dataclasses.replace(made, num_classes=num_classes)
  federation = data.by_client(dataset, owners, max_examples=max_examples)
  return federation, federation


# Users of each file of pfl-research here: more than half as many as its config declares.
_PFL_USERS = {"flair_federated.hdf5": 25_000, "stackoverflow.hdf5": 342_477}


@functools.cache
def _pfl_users(
  name: Any,
  data_dir: Any,
  *,
  num_classes: Any,
  image_size: Any,
  fine_grained: bool,
  test_split: str,
  max_examples: Any,
):
  """A user for each row, and one user with 600; values depend on all arguments."""
  validate.one_of(("val", "test"), test_split=test_split)
  if name not in _PFL_USERS:
    raise UserError("no such file", field="name", value=name)
  number = _PFL_USERS[name]
  word = hashlib.sha256(repr((name, data_dir, image_size, fine_grained)).encode()).digest()
  rng = np.random.default_rng(list(word))
  owners = np.minimum(np.arange(number + 599), number - 1)
  if name.startswith("flair"):
    x = rng.random((len(owners), 4, 4, 3), np.float32)
    y = rng.integers(0, 2, (len(owners), num_classes))
    names = tuple(f"label {place}" for place in range(num_classes))
    made = data.from_arrays(x, y, target=data.Labels(names), name=name)
  else:
    x = rng.integers(1, 50, (len(owners), 21)).astype(np.int32)
    made = data.from_arrays(
      x, np.zeros(len(x), int), num_classes=1, vocab_size=50, name=name
    )
  test = data.from_arrays(
    made.x[:100] if test_split == "val" else made.x[100:200], np.asarray(made.y)[:100],
    name=name, split="test", vocab_size=made.vocab_size,
    **({"target": made.target} if made.target else {"num_classes": 1}),
  )  # fmt: skip
  federation = data.by_client(made, owners, max_examples=max_examples)
  return federation, data.by_client(test, np.arange(100))


_PARAMS: dict[str, Any] = {}


class _Remembered(NamedTuple):
  """A model whose parameters are drawn once for each shape and key."""

  module: Any

  def __getattr__(self, name: str) -> Any:
    return getattr(self.module, name)

  def init(self, key: Any, x: Any) -> Any:
    if isinstance(key, core.Tracer):  # who asks for the shapes alone
      return self.module.init(key, x)
    what = repr((self.module, x.shape, jax.random.key_data(key).tolist()))
    if what not in _PARAMS:
      _PARAMS[what] = self.module.init(key, x)
    return _PARAMS[what]


@contextlib.contextmanager
def fast():
  """Within it builds are quick, and still depend on all that they depend on."""
  make, read, known = build.make_model, build.load_data, {}

  def load_once(
    config: Any, features: bool = True
  ) -> Any:  # what this key forgets shows as a field without effect
    what = repr((config.data, config.model, features))
    if what not in known:
      known.clear()
      known[what] = read(config, features=features)
    return known[what]

  load = lambda name, data_dir, max_length, *_: _loaded(name, data_dir, max_length)
  with (
    mock.patch.object(accounting, "calibrate_noise_multiplier", _calibrated),
    mock.patch.object(accounting, "epsilon", _spent),
    mock.patch.object(accounting, "privacy_statement", _stated),
    mock.patch.object(build, "make_model", lambda *a, **k: _Remembered(make(*a, **k))),
    mock.patch.object(registry, "_load", load),
    mock.patch.object(registry, "nominal_size", _nominal),
    mock.patch.object(shakespeare, "are_published", lambda data_dir: True),
    mock.patch.object(build, "load_data", load_once),
    mock.patch.object(scattering_features, "scattering_chunks", _chunks),
    mock.patch.object(sentence_encoder, "sentence_chunks", _sentences),
    mock.patch.object(public_trunks, "trunk_chunks", _trunk),
    mock.patch.object(patches, "patch_chunks", _patches),
    mock.patch.object(patch_features, "learned", lambda shape: shape),
    mock.patch.object(shakespeare, "shakespeare_federation", _roles),
    mock.patch.object(tff, "tff_federation", _writers),
    mock.patch.object(pfl, "pfl_federation", _pfl_users),
  ):
    yield


# --- central runs


def training_run(config: Any) -> Any:
  """What a TrainConfig builds. UserError where it is refused."""
  build.Central(config).check()
  whole = build.Central(config).new_keys()
  random = whole._replace(noise=_KEY, local=_KEY, sampler=3)
  if isinstance(config.privacy, LeastSquares):
    loaded = build.load_data(config)
    work = one_release.phase(config, loaded, random)
    guarantee = work.guarantee
    said = [guarantee.statement(1), guarantee.budget, guarantee.step_event(0)]
    key = jax.random.key_data(random.init).tolist()
    return plain([*said, work.planned(), key, loaded[0].x[:40], loaded[0].y])
  options: dict[str, Any] = {}

  def spied(loss_fn: Any, plan: Any, tx: Any, **given: Any) -> Any:
    options.update(given, tx=tx)
    return TrainState  # nobody runs it

  def viewed(apply: Any, views: Any, tx: Any, **given: Any) -> Any:
    options.update(given, tx=tx, views=views)
    return TrainState

  with (
    mock.patch.object(build.training, "dp_sgd", spied),
    mock.patch.object(build.recipes, "contrastive", viewed),
    # whose optimizer moves other parameters here; the canaries are facts of their own
    mock.patch.object(central_audit, "watched", lambda config, tx: tx),
  ):
    run = build.assemble(config, None, random)
  rates = [float(run.schedule(step)) for step in (0, 1, 7, config.num_steps - 1)]
  facts = [run.plan, options, rates, trees.sha256(run.params), run.task.name]
  facts += [_loss(config, run), run.train.x[:40], run.train.y, run.noise]
  return plain([*facts, None if run.canaries is None else run.canaries.included])


def _loss(config: Any, run: Any) -> str:
  """The gradient of one example, traced once for all configs that should agree on it: what
  this key forgets shows as a field that changes nothing."""
  if config.loss == "contrastive":
    return config.loss  # of no example
  what = repr((config.model, config.augmentation, config.augmult, run.train.x.shape[1:]))
  if what not in _PARAMS:
    example = Example(run.train.x[0], run.train.y[0], _KEY)
    _PARAMS[what] = str(jax.make_jaxpr(jax.grad(run.loss_fn))(run.params, example))
  return _PARAMS[what]


# --- runs over clients


class _Recorder:
  """Stands for a module: its functions record how they are called."""

  def __init__(self, module: Any):
    self._module = module

  def __getattr__(self, name: str) -> Any:
    found = getattr(self._module, name)
    if isinstance(found, type) or not callable(found) or name in ("uniform", "by_examples"):
      return found
    return lambda *args, **kwargs: Call(name, args, tuple(kwargs.items()))


def federated_run(config: Any) -> Any:
  """What a FedConfig builds. UserError where it is refused."""
  federate_build.check(config)
  whole = build.Central(config).new_keys()
  random = whole._replace(noise=_KEY, local=_KEY, sampler=3)
  by_name = lambda name, **options: Call(name, (), tuple(options.items()))
  made = fields.Setting.make
  make = lambda self, *args, **named: (  # what trains nothing here is made in earnest
    Call(type(self).__name__, (*args, dataclasses.asdict(self)), tuple(named.items()))
    if type(self).function.__module__.startswith("dpjax.federated")
    else made(self, *args, **named)
  )
  with (
    mock.patch.object(federate_build, "federated", _Recorder(federated)),
    mock.patch.object(federate_build, "secure", _Recorder(secure)),
    mock.patch.object(fields.Setting, "make", make),
    mock.patch.object(federate_build.named, "by_name", by_name),
    mock.patch.object(federate_build, "process_clients", lambda inner: inner),
    # whose optimizer moves other parameters here; `_audited` says whether it is watched
    mock.patch.object(federate_build.audit.Audited, "watched", lambda audited, tx: tx),
    mock.patch.object(federate_build.audit.Audited, "seeing", lambda audited, alg: alg),
  ):
    run = federate_build.assemble(config, None, random)
    algorithm = _unwrapped(run.algorithm)
    words = run.guarantee.statement(config.num_rounds)
  guarantee, dealt = run.guarantee, run.federation
  facts = [run.plan, guarantee.kind, guarantee.delta, guarantee.relation, words, algorithm]
  facts += [run.work, trees.sha256(run.params), run.task.name, guarantee.step_event(0)]
  facts += [np.concatenate(dealt.indices), [len(rows) for rows in dealt.indices]]
  facts += [dealt.dataset.x[:40], dealt.dataset.y, _audited(run.audited)]
  facts += [federate_build.phase(run).memory.keywords["on_disk"]]
  return plain(facts)


def _audited(audited: Any) -> Any:
  """Coins and directions, and whether every round is scored."""
  if audited.canaries is None:
    return None
  watched = audited.watched(optax.identity())
  started = watched.init(jnp.zeros(3))
  return [audited.canaries.included, audited.directions, len(jax.tree.leaves(started))]


def _unwrapped(algorithm: Call) -> Any:
  """The algorithm with what it wraps clients in, and what they remember, spelled out."""
  if algorithm.name == "forgiving":
    return Call(algorithm.name, tuple(map(_unwrapped, algorithm.args)), algorithm.kwargs)
  kwargs = dict(algorithm.kwargs)
  if "wrap" in kwargs:
    kwargs["wrap"] = kwargs["wrap"]("client")
    kwargs["memory"] = kwargs["memory"] is not None
  if callable(kwargs.get("steps")):
    kwargs["steps"] = [float(kwargs["steps"](tau)) for tau in (1, 2, 5)]
  return Call(algorithm.name, algorithm.args, tuple(kwargs.items()))
