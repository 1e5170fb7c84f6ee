"""Models of nnx, Equinox and plain functions: the same outputs, names and refusals as linen's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from configs import quickstart
from dpjax import data, trees
from dpjax.experiments.config import fields
from dpjax.experiments.kinds.central import build
from dpjax.experiments.run.run_keys import draw
from dpjax.models.libraries.by_path import Model
from dpjax.zoo import networks
from dpjax.zoo.networks import registry
from tests.refuses import refuses

eqx = pytest.importorskip("equinox")
other_libraries = pytest.importorskip("tests.core.models.other_libraries")

_MODULE = "tests.core.models.other_libraries"
_KEY = jax.random.key(3)
_X = jnp.asarray(np.random.default_rng(0).random((5, 8, 8, 1)), jnp.float32)
_TRAIN, _ = data.load("digits")


def _model(name, **options):
  return networks.build(f"{_MODULE}:{name}", num_classes=10, **options)


def _started(name, **options):
  """What a run starts from: (task, model, parameters)."""
  config = fields.replace_all(
    quickstart.get_config(),
    {"model.name": f"{_MODULE}:{name}", "model.options": options},
  )
  return build.start(config, _TRAIN, draw(0, noise_seed=0))


def _as_nnx(name, key):
  module = getattr(other_libraries, name)
  given = {"input_shape": (8, 8, 1)} if name == "Nnx" else {}
  made = module(num_classes=10, rngs=nnx.Rngs(key), **given)
  made.eval()
  return made


def _as_equinox(key):
  module = other_libraries.Equinox(num_classes=10, key=key, input_shape=(8, 8, 1))
  return jax.vmap(eqx.nn.inference_mode(module))


def _expected(name, key, x):
  """Outputs of the library's own calls."""
  if name == "Nnx":
    return _as_nnx(name, key)(x)
  if name == "Equinox":
    return _as_equinox(key)(x)
  if name == "Functions":
    functions = other_libraries.Functions(10)
    return functions.apply(functions.init(key, x), x)
  init, apply = other_libraries.pair(10)
  return apply(init(key, x.shape)[1], x)


@pytest.mark.cases(slow=["pair"], long=...)
@pytest.mark.parametrize("name", ["Nnx", "Equinox", "Functions", "pair"])
def test_outputs_are_those_of_the_library_itself(name):
  model = _model(name)
  # One program for all outputs, as every eager operation would be one of its own.
  outputs = jax.jit(lambda key, scale: model.apply(_scaled(model, key, scale), _X))
  expected = jax.jit(lambda key: _expected(name, key, _X))
  np.testing.assert_allclose(outputs(_KEY, 1.0), expected(_KEY), rtol=1e-5, atol=1e-6)
  other = jax.random.key(4)
  np.testing.assert_allclose(outputs(other, 1.0), expected(other), rtol=1e-5, atol=1e-6)
  assert not np.allclose(expected(other), expected(_KEY))
  # A parameter that moves moves the outputs: nothing of the first ones stayed inside.
  assert not np.allclose(outputs(_KEY, 2.0), outputs(_KEY, 1.0))


def _scaled(model, key, scale):
  return trees.scale(model.init(key, _X[:1]), scale)


def test_parameters_have_the_names_of_the_layers():
  names = {
    name: list(trees.named_leaves(jax.eval_shape(_model(name).init, _KEY, _X[:1])))
    for name in ("Nnx", "Equinox", "pair")
  }
  layers = ("body", "head")
  assert names["Nnx"] == [f"params/{at}/{w}" for at in layers for w in ("bias", "kernel")]
  assert names["Equinox"] == [
    f"params/{at}/{w}" for at in layers for w in ("bias", "weight")
  ]
  assert names["pair"] == ["params/1/0", "params/3/0"]
  assert registry.options(f"{_MODULE}:Nnx") == ("rate",)
  assert registry.options(f"{_MODULE}:Equinox") == ("rate",)


@pytest.mark.cases(long=["NnxConstant"], slow=...)
@pytest.mark.parametrize("name", ["Constant", "NnxConstant"])
def test_constants_follow_no_key_and_stay_after_a_trace(name):
  model = _model(name)
  params = jax.jit(lambda key: model.init(key, _X[:1]))(_KEY)
  assert list(trees.named_leaves(params)) == [
    name for name in trees.named_leaves(params) if name.startswith("params/head/")
  ]
  # First called inside a trace: a tracer that stayed in the model would fail below.
  traced = jax.jit(model.apply)(params, _X)
  again = _model(name)
  jax.eval_shape(again.init, jax.random.key(9), _X[:1])
  # Another function, so another trace of the first model.
  both = jax.jit(lambda params: (model.apply(params, _X), again.apply(params, _X)))
  for outputs in both(params):
    np.testing.assert_allclose(outputs, traced, rtol=1e-5, atol=1e-6)
  assert np.abs(np.asarray(traced)).max() > 0


_DROPPED = [("Nnx", 0.5), ("Equinox", 0.5), ("Functions", 0.5), ("NnxCalled", None)]


@pytest.mark.cases(slow=["NnxCalled-None"], long=...)
@pytest.mark.parametrize(("name", "rate"), _DROPPED)
def test_dropout_has_the_rate_in_training_and_is_off_in_evaluation(name, rate):
  options = {} if rate is None else {"rate": rate}
  task, model, params = _started(name, **options)
  assert task.keyed and model.draws(params, _X[:1])
  evaluated = model.apply(params, _X[:1])
  if rate is not None:
    np.testing.assert_array_equal(evaluated, _model_without(name, params))
  else:
    np.testing.assert_array_equal(evaluated, model.apply(params, _X[:1]))
  keys = jax.random.split(jax.random.key(1), 4000)
  drawn = jax.jit(jax.vmap(lambda key: model.apply(params, _X[:1], key=key)[0]))(keys)
  # Dropout before a linear layer has the mean of evaluation: E[mask / (1 - rate)] = 1.
  error = np.abs(drawn.mean(axis=0) - evaluated[0]) / (drawn.std(axis=0) / np.sqrt(4000))
  assert error.max() < 4.5
  assert len(np.unique(np.round(np.asarray(drawn[:64, 0]), 5))) > 32


def _model_without(name, params):
  """Outputs of the same parameters in a network without dropout."""
  plain = _model(name, rate=0.0)
  plain.init(_KEY, _X[:1])
  return plain.apply(params, _X[:1])


@pytest.mark.cases(quick=["pair"], slow=...)
@pytest.mark.parametrize("name", ["Nnx", "NnxRecurrent", "Equinox", "Functions", "pair"])
def test_without_dropout_examples_have_no_keys(name):
  task, _, _ = _started(name)
  assert not task.keyed


_REFUSED = {
  "NnxBatchNorm": "BatchNorm mixes examples",
  "EquinoxBatchNorm": "BatchNorm mixes examples",
  "NnxSpectralNorm": "BatchStat in its SpectralNorm; the loss of one",
  "LinenSpectralNorm": "not 'batch_stats' of SpectralNorm_0; the loss of one",
  "NnxCounter": "must hold no state but nnx.Param, not calls of type Variable",
  "LinenCounter": "must hold no state but \"params\", not 'counts'",
  "Counted": "calls of int32 is state",
  "NnxWrites": "writes to a parameter in its call",
  "NnxRandomCarry": "draws random numbers in evaluation too",
  "NnxAlways": "draws random numbers in evaluation too",
  "EquinoxAlways": "must run without a key in evaluation",
  "LinenSilent": "its Dropout is off in training, too",
  "NnxOneExample": r"must return logits of shape \(1, 10\) .*, not of shape \(10,\)",
  "NnxTuple": "must return logits of shape .*, not a tuple",
  "NnxOtherArguments": "missing 1 required positional argument: 'width'",
  "NnxUncallable": "'NnxUncallable' object is not callable",
  "NnxNoKey": "must take an argument rngs",
  "nnx_made": "must take an argument rngs",
  "nnx_number": "must return an nnx module, not int",
  "EquinoxBatch": "dot_general",
  "EquinoxMean": "unbound axis name: batch",
  "haiku_with_rng": r"hk\.without_apply_rng",
  "Twice": "must have one parameter of the name 'a/b'",
  "Empty": "must have parameters",
  "number": "must return a linen module, not int",
  "lone_function": "must return a linen module, not function",
}


@pytest.mark.cases(slow=["EquinoxAlways", "NnxWrites", "NnxRandomCarry"])
@pytest.mark.parametrize("name", _REFUSED)
def test_what_no_run_can_train_is_one_line(name):
  with refuses("model.name") as refused:
    _started(name)
  message = str(refused.value)
  assert message.startswith(f"model.name='{_MODULE}:{name}': ")
  assert "\n" not in message and len(message) < 330


@pytest.mark.slow
def test_a_key_that_is_only_passed_on_counts_as_no_dropout():
  # Layers of Equinox take a key that most of them ignore.
  task, model, _ = _started("Equinox", rate=0.0)
  assert not task.keyed and isinstance(model, Model)
