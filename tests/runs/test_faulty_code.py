"""Whatever a user's own part does wrong is one line that names its field."""

import dataclasses

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from configs import quickstart
from configs.fed import quickstart as fed_quickstart
from dpjax import data, federated, sampling
from dpjax.experiments.config import fields
from dpjax.experiments.run import loop
from dpjax.validate import UserError


def _raises(*args, **named):
  raise KeyError("told\nin two lines")


def _leaves(*args, **named):
  raise SystemExit(3)


def _seven(*args, **named):
  return 7


def _more(one, two, three, four, five, six, seven):
  return None


@dataclasses.dataclass(frozen=True)
class _Sampler(sampling.PoissonSampler):
  fault: str = ""

  def draw(self, num_examples, *, seed, step):
    return {"draws": np.arange(num_examples) + 0.5}[self.fault]

  def event(self, inner):
    return {"draws": None, "event": 3}[self.fault]


def _sampler(fault):
  return lambda num_examples, sampling_prob: _Sampler(0.5, num_examples + 1, fault)


class _Net(nn.Module):
  num_classes: int

  def __call__(self, x):
    raise ValueError("no such\nlayer")


class _Flat(nn.Module):
  num_classes: int

  @nn.compact
  def __call__(self, x):
    return nn.Dense(1)(x.reshape(x.shape[0], -1))[:, 0]


class _Narrow(_Flat):
  @nn.compact
  def __call__(self, x):
    return nn.Dense(3)(x.reshape(x.shape[0], -1))


def _two_shapes():
  train, test = data.load("digits")
  return train, dataclasses.replace(test, x=test.x[:, :4])


def _client(**parts):
  return lambda loss_fn, tx, **_: federated.local_training(loss_fn, tx)._replace(**parts)


def _algorithm(**parts):
  return lambda loss_fn, tx, **options: federated.fed_avg(loss_fn, tx, **options)._replace(
    **parts
  )


def _median(**parts):
  return lambda: federated.median()._replace(**parts)


_ANY = {"raises": _raises, "leaves": _leaves, "seven": _seven, "more": _more}
_FAULTS = {
  "model.name": {"module": _Net, "flat": _Flat, "narrow": _Narrow},
  "loss": {
    "no number": lambda apply: lambda params, example: apply(params, example.x[None]),
    "text": lambda apply: lambda params, example: "low",
    "fails": lambda apply: lambda params, example: {}["x"],
    "one argument": lambda apply: lambda params: 0.0,
  },
  "data.name": {"two shapes": _two_shapes},
  "optimizer.rule": {
    "init": lambda rate: optax.GradientTransformation(_raises, _raises),
    "update": lambda rate: optax.GradientTransformation(lambda p: (), _seven),
    "one number": lambda rate: optax.GradientTransformation(
      lambda p: (), lambda u, s, p=None: (jnp.ones(()), s)
    ),
  },
  "privacy.sampler": {"draws": _sampler("draws"), "event": _sampler("event")},
  "client_optimizer.rule": {
    "update": lambda rate: optax.GradientTransformation(lambda p: (), _raises)
  },
  "server_optimizer.rule": {},
  "algorithm": {
    "init": _client(init=_raises),
    "step": _client(step=_seven),
    "finish": _client(finish=_raises),
    "round": _algorithm(round=_seven),
    "state": _algorithm(init=_seven),
  },
  "aggregator": {
    "init": _median(init=_raises),
    "update": _median(update=_seven),
    "shape": _median(update=lambda messages, mask, state, weights=None: (0.0, state)),
  },
}  # fmt: skip
_PATHS = {
  f"{field} {name}": (field, part)
  for field, parts in _FAULTS.items()
  for name, part in (_ANY | parts).items()
}
_NATIVE = [(field, path) for field in _FAULTS for path in ("os:system", "builtins:dict")]
_CENTRAL = ("model.name", "loss", "data.name", "optimizer.rule", "privacy.sampler")


def _refused(field, path, folder):
  central = field in _CENTRAL
  config = (quickstart if central else fed_quickstart).get_config()
  small = {"model.options": {}, "model.name": "linear"}
  small |= {"num_steps": 2} if central else {"num_rounds": 2, "data.limit": 100}
  if central:
    small |= {"privacy.epsilon": None, "privacy.noise_multiplier": 1.0}
  else:
    small |= {"privacy": "none", "server_optimizer.rule.momentum": 0.0}
    small |= {"partition.num_clients": 20, "clients_per_round": 5.0}
  config = fields.replace(fields.replace_all(config, small), field, path)
  with pytest.raises(UserError) as caught:
    loop.train(config, folder / "run")
  message = str(caught.value)
  assert message.startswith(f"{field}={path!r}") and "\n" not in message, message
  assert len(message) < 400
  assert not (folder / "run" / "config.json").exists()  # it is free for the mended one


@pytest.mark.cases(long=[0, 5, 6, 7, 8, 11, 12, 13, 25, 26, 37, 47, 56, 57])
@pytest.mark.parametrize("name", _PATHS)
def test_a_faulty_part_is_one_line_that_names_its_field(name, tmp_path, monkeypatch):
  field, part = _PATHS[name]
  monkeypatch.setitem(globals(), "part", part)
  _refused(field, f"{__name__}:part", tmp_path)


@pytest.mark.cases(long=[15, 16, 17])
@pytest.mark.parametrize(("field", "path"), _NATIVE)
def test_what_is_no_such_part_at_all_is_one_line(field, path, tmp_path):
  _refused(field, path, tmp_path)
