"""One set of streams in the hands of a careless caller: other data, other noise."""

import dataclasses

import jax
import numpy as np
import pytest

from dpjax import data, relevance
from dpjax.relevance import pipeline, settings, train
from dpjax.zoo import networks
from dpjax.zoo.networks import registry

_CLASSES = 3
_KEYS = relevance.Keys(jax.random.key(0), jax.random.key(1), 0, 7)


def _records(n, seed=0):
  x = np.random.default_rng(seed).random((n, 4)).astype(np.float32)
  y = np.arange(n) % _CLASSES
  return data.from_arrays(x, y, num_classes=_CLASSES, nominal_size=n)


def _neighbour(rows):
  """With another first record."""
  x = rows.x.copy()
  x[0] = 1 - x[0]
  return data.from_arrays(x, rows.y, num_classes=_CLASSES, nominal_size=rows.nominal_size)


class _Watched:
  """A net that notes what its initialiser is shown."""

  def __init__(self, width, seen):
    self.net = networks.build("linear", num_classes=width)
    self.seen, self.apply = seen, self.net.apply

  def init(self, key, x):
    self.seen.append(np.asarray(x))
    return self.net.init(key, x)


def _job(net=None, **fields):
  net = networks.build("linear", num_classes=_CLASSES) if net is None else net
  how = settings.Rigorous(shuffle=False, model1="untrained", epsilon_b=0.5, split=False)
  standard = {"train": _records(12), "test": _records(6, 1), "keys": _KEYS}
  standard |= {"nets": relevance.Nets(net, net, net, net), "rigorous": how, "epsilon": 4.0}
  standard |= {"training": settings.Training(num_epochs=1, batch_size=4)}
  return relevance.Inputs(**{**standard, **fields})


def _drawn(monkeypatch, method, job):
  """Everything secret that a method took from its streams, as text."""
  found, key = [], relevance.Keys.key

  def note(self, purpose):
    drawn = key(self, purpose)
    found.append(f"{purpose} {jax.random.key_data(drawn)}")
    return drawn

  def fit_private(loss, params, *args, batch_seed, **options):
    found.append(f"batches {batch_seed}")
    return params  # in place of the steps, which are run by returning them

  with monkeypatch.context() as patched:
    patched.setattr(relevance.Keys, "key", note)
    patched.setattr(train, "fit_private", fit_private)
    patched.setattr(train, "in_one_go", lambda steps, on_epoch: steps)
    patched.setattr(train, "fit", lambda loss, params, *args, **options: params)
    relevance.run(method, job)
  return set(found)


@pytest.mark.cases(quick=["no_dp"], long=...)
@pytest.mark.parametrize("method", pipeline.METHODS)
def test_p17_neighbours_share_neither_noise_nor_batches(monkeypatch, method):
  """The difference of two releases with one noise IS what the other record did."""
  job = _job()
  drawn = _drawn(monkeypatch, method, job)
  assert bool(drawn) == (method != "no_dp")
  others = [
    {"train": _neighbour(job.train)},
    {"epsilon": 5.0},
    {"private": settings.Private(l2_clip_norm=2.0)},
    {"training": settings.Training(num_epochs=2, batch_size=4)},
    {"nets": relevance.Nets(*[networks.build("mlp", num_classes=_CLASSES)] * 4)},
  ]
  for changed in others:
    other = dataclasses.replace(job, **changed)
    assert not drawn & _drawn(monkeypatch, method, other), changed
  assert drawn == _drawn(monkeypatch, method, _job())  # equal ones are one release


@pytest.mark.slow
def test_p17_two_methods_share_no_noise(monkeypatch):
  drawn = [_drawn(monkeypatch, name, _job()) for name in pipeline.METHODS]
  assert len(set.union(*drawn)) == sum(map(len, drawn))


@pytest.mark.parametrize("name", registry.MODELS)
def test_a_registered_model_is_told_by_what_it_is(name):
  """Noise is bound to the net's repr; an address in it would be another in every process."""
  assert " at 0x" not in repr(networks.build(name, num_classes=_CLASSES))


@pytest.mark.cases(
  slow=[
    "untrained-radp",
    "untrained-ilm",
    "untrained-dpsgd",
    "untrained-radp_rigorous",
    "untrained-tempered",
    "public-radp_rigorous",
  ],
  long=[
    "none-radp_rigorous",
    "untrained-radp_dpsgd",
    "untrained-adlm",
    "dp_sgd-dpdligdo",
    "dp_sgd-dp_sgld",
    "dp_sgd-no_dp",
    "dp_sgd-radp_rigorous",
  ],
)
@pytest.mark.parametrize("method", pipeline.METHODS)
@pytest.mark.parametrize("model1", settings.MODEL_1)
def test_no_initialiser_sees_a_record(monkeypatch, method, model1):
  if model1 != "untrained" and method != "radp_rigorous":
    pytest.skip("has no such model 1")
  seen, fields = [], {}
  if model1 == "public":
    fields["public"] = _records(12, 9)
  if method == "radp_rigorous":
    how = settings.Rigorous(shuffle=False, model1=model1, epsilon_b=0.5, split=False)
    fields["rigorous"] = how
  monkeypatch.setattr(train, "fit_private", lambda loss, params, *a, **k: params)
  monkeypatch.setattr(train, "fit", lambda loss, params, *a, **k: params)
  monkeypatch.setattr(train, "in_one_go", lambda steps, on_epoch: steps)
  relevance.run(method, _job(_Watched(_CLASSES, seen), **fields))
  assert seen and not any(np.any(x) for x in seen)
  assert {x.shape for x in seen} == {(1, 4)} and {str(x.dtype) for x in seen} == {"float32"}
