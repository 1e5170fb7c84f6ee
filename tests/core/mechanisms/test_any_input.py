"""Whatever a user passes ends in a result or in one UserError line; nobody is left out.

The mechanisms are those that `dpjax.mechanisms` exports, found by introspection: one that is
added is covered by being exported.
"""

import dataclasses
import fractions
import inspect
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from dpjax import mechanisms
from dpjax.mechanisms.sparse_vector import SparseVectorAnswer
from dpjax.validate import UserError
from tests.refuses import refuses

_KEY = jax.random.key(0)
_PUBLIC = {
  name: one
  for name, one in inspect.getmembers(mechanisms, callable)
  if not name.startswith("_")
}
_MECHANISMS = {
  name: kind
  for name, kind in _PUBLIC.items()
  if dataclasses.is_dataclass(kind)
  and any("__call__" in vars(base) for base in kind.__mro__[:-1])
}
_CHECKED = {name: _PUBLIC[name] for name in ("BudgetLedger", "ShardCharge")} | _MECHANISMS
_FUNCTIONS = {name: f for name, f in _PUBLIC.items() if inspect.isfunction(f)}
_USUAL = {"lower": 0.0, "upper": 10.0, "records": range(3), "delta": 1e-5}
_BY_TYPE = {"float": 0.5, "int": 3, "ArrayLike": np.arange(3)}

_STRANGE_SETTINGS = (
  math.nan, math.inf, -math.inf, -1.0, 0, -0.0, True, None, "1", 1j, 10**310, -(10**310), 1e308,
  1e-308, 5e-324, 1e-40, 1e38, 1e200, 2.5, 2**31, 2**24 + 1, np.float32(2.0), np.float64(0.5),
  np.int64(3), fractions.Fraction(1, 3), np.zeros((2, 2)), np.array(1.0), [1.0], "replace_one",
  "replace_special", "laplace", "no",
)  # fmt: skip
_STRANGE_DATA = (
  math.nan, math.inf, 3.0, 7, -5, 2**40, 10**30, 1e300, True, 1 + 2j, None, "x", b"x", [], [[]],
  [1, "a"], [[1.0], [1.0, 2.0]], {"a": [1.0]}, object(), [None], np.array(["2020"], "M8[D]"),
  [1.0, 2.0, 3.0], (1, 2, 3), np.array([1e30, 1e30, -1e30]), np.array([-np.inf] * 3),
  np.array([-np.inf, 0.0, 1.0]), np.array([2**63 - 1, -(2**63), 0]), _KEY,
  np.array([2**64 - 1, 0, 1], np.uint64), np.array([3e38, -3e38, 0], np.float32),
  np.array([1, 2], object), np.longdouble(3.0), jnp.array([1, 2, 0], jnp.bfloat16),
)  # fmt: skip
_arrays = st.sampled_from(
  ["bool", "i1", "u1", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "c8"]
).flatmap(lambda kind: npst.arrays(kind, st.sampled_from([(), (0,), (3,), (2, 3), (3, 0)])))


def _to_jax(array):
  with np.errstate(all="ignore"):  # float64 that float32 cannot hold
    return jnp.asarray(array)


_data = st.one_of(st.sampled_from(_STRANGE_DATA), _arrays, _arrays.map(_to_jax))


def _usual(call):
  """Settings that are accepted, by name, default and annotation."""
  found = {}
  for name, parameter in inspect.signature(call).parameters.items():
    if name in _USUAL and parameter.default is parameter.empty:
      found[name] = _USUAL[name]
    elif parameter.default is not parameter.empty:
      found[name] = parameter.default
    else:
      found[name] = _BY_TYPE[str(parameter.annotation)]
  return found


def _label(shard):
  leaf = jax.tree.leaves(shard)[0]
  return (jnp.sum(leaf.astype(jnp.float32)) > 0).astype(jnp.int32)


def _called(mechanism, data, key=_KEY):
  # After the mechanism itself, its key and its data.
  named = list(inspect.signature(type(mechanism).__call__).parameters)[3:]
  beside = {"fn": _label, "y": np.zeros((3, 1)), "labels": np.zeros(3, int)}
  extra = [value for name, value in beside.items() if name in named]
  return mechanism(key, data, *extra)


def _ends_well(call):
  """The result, or None after one UserError line."""
  try:
    result = call()
  except UserError as error:
    assert "\n" not in str(error) and 10 < len(str(error)) < 600, error
    return None
  for leaf in jax.tree.leaves(result):
    if isinstance(leaf, float | jax.Array | np.ndarray):
      ok = isinstance(result, SparseVectorAnswer) or not np.isnan(leaf).any()
      assert ok, result
  return result


def test_introspection_finds_them_all():
  assert set(_MECHANISMS) >= {
    "Laplace", "Gaussian", "Exponential", "PermuteAndFlip", "ReportNoisyMax", "BoundedMean",
    "Histogram", "Quantile", "RandomizedResponse", "SparseVector", "SampleAndAggregateMean",
    "SampleAndAggregateVote",
  }  # fmt: skip
  for name, call in (_CHECKED | _FUNCTIONS).items():
    assert _ends_well(lambda: call(**_usual(call))) is not None, name


@pytest.mark.cases(
  quick=["ClassSums", "LeastSquares", "Whitening"], slow=["GNMax"], long=...
)
@pytest.mark.parametrize("name", _MECHANISMS)
@settings(max_examples=25, derandomize=True)
@given(data=_data)
def test_any_data(name, data):
  mechanism = _MECHANISMS[name](**_usual(_MECHANISMS[name]))
  _ends_well(lambda: _called(mechanism, data))


@pytest.mark.cases(
  slow=["29-Gaussian", "29-Quantile", "29-SampleAndAggregateMean", "21-ConfidentGNMax"],
  long=[
    "2-Gaussian",
    "2-Laplace",
    "3-RandomizedResponse",
    "4-RandomizedResponse",
    "13-Gaussian",
    "13-Laplace",
    "13-Quantile",
    "14-Gaussian",
    "14-Laplace",
    "17-BoundedMean",
    "21-BoundedMean",
    "21-Exponential",
    "21-Gaussian",
    "21-Laplace",
    "21-Quantile",
    "21-SparseVector",
    "22-BoundedMean",
    "22-Exponential",
    "22-Quantile",
    "22-RandomizedResponse",
    "22-SparseVector",
    "23-BoundedMean",
    "23-Quantile",
    "23-SampleAndAggregateMean",
    "23-SampleAndAggregateVote",
    "23-SparseVector",
    "24-Quantile",
    "24-SampleAndAggregateMean",
    "25-Quantile",
    "25-ReportNoisyMax",
    "25-SampleAndAggregateMean",
    "25-SparseVector",
    "26-Quantile",
    "26-RandomizedResponse",
    "26-SampleAndAggregateMean",
    "26-SampleAndAggregateVote",
    "28-Quantile",
    "28-RandomizedResponse",
    "29-SparseVector",
    "32-Exponential",
    "32-Quantile",
    "32-SparseVector",
  ],
)
@pytest.mark.parametrize("name", _MECHANISMS)
@pytest.mark.parametrize("index", range(len(_STRANGE_DATA)))
def test_strange_data(name, index):
  mechanism = _MECHANISMS[name](**_usual(_MECHANISMS[name]))
  _ends_well(lambda: _called(mechanism, _STRANGE_DATA[index]))


@pytest.mark.cases(long=["None-Histogram"])
@pytest.mark.parametrize("name", _MECHANISMS)
@pytest.mark.parametrize("key", [None, 0, jnp.zeros(2, jnp.uint32), "key"])
def test_strange_keys_are_refused(name, key):
  mechanism = _MECHANISMS[name](**_usual(_MECHANISMS[name]))
  for one in (key, jax.random.split(_KEY, 2)):
    with refuses("key"):
      _called(mechanism, np.zeros(30, int), one)


@pytest.mark.cases(
  quick=[
    "BudgetLedger",
    "ShardCharge",
    "ChannelStatistics",
    "ClassSums",
    "LeastSquares",
    "Whitening",
  ],
  slow=["GNMax"],
  long=...,
)
@pytest.mark.parametrize("name", _CHECKED)
def test_strange_settings(name):
  """Each setting in turn takes every strange value; what is then accepted must also run."""
  kind = _CHECKED[name]
  for setting in _usual(kind):
    if setting in ("charges", "event", "records"):
      continue
    for value in _STRANGE_SETTINGS:
      made = _ends_well(lambda: kind(**{**_usual(kind), setting: value}))
      if made is not None and name in _MECHANISMS and setting != "num_bins":
        with jax.disable_jit():  # else each value would be compiled for
          _ends_well(lambda: _called(made, np.arange(6)))
        relation = made.neighboring_relation
        _ends_well(lambda: made.event(relation))


@pytest.mark.parametrize("name", _FUNCTIONS)
def test_strange_arguments_of_functions(name):
  call = _FUNCTIONS[name]
  for argument in _usual(call):
    for value in _STRANGE_SETTINGS:
      _ends_well(lambda: call(**{**_usual(call), argument: value}))


def test_the_check_can_fail():
  def broken():
    raise TypeError("unsupported operand")

  with pytest.raises(TypeError):
    _ends_well(broken)
  with pytest.raises(AssertionError):
    _ends_well(lambda: jnp.nan)
