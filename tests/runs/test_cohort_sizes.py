"""Cohorts that are too small for an aggregator or a secure sum, refused before the first round."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from configs.fed import quickstart
from dpjax import federated, secure
from dpjax.experiments.config import fields
from dpjax.experiments.kinds.federated import build, cohort_sizes
from dpjax.experiments.kinds.federated.config import AGGREGATORS
from dpjax.experiments.kinds.federated.secure_sums import SECURE_SUMS
from dpjax.federated import described
from dpjax.federated.aggregation import RoundRefused
from dpjax.secure.encoding import Encoding
from dpjax.validate import UserError

_ROBUST = [name for name, row in described.aggregators().items() if not row.is_mean]


def _check(**more):
  none = {
    "privacy": "none", "privacy.delta": 1e-5, "privacy.sampler": "fixed_size",
    "num_rounds": 100,
  }  # fmt: skip
  build.check(fields.replace_all(fields.replace_all(quickstart.get_config(), none), more))


def _refused(**more):
  try:
    _check(**more)
  except UserError as error:
    assert "\n" not in str(error)
    return error
  return None


def _exact(least, num_clients, cohort):
  """The chance of 1 to least - 1 clients, by the definition of a binomial number."""
  prob = cohort / num_clients
  return sum(
    math.comb(num_clients, k) * prob**k * (1 - prob) ** (num_clients - k)
    for k in range(1, least)
  )


@pytest.mark.parametrize(
  ("least", "num_clients", "cohort"),
  [(5, 100, 10.0), (2, 7, 3.5), (12, 1000, 30.0), (1, 9, 1.0)],
)
def test_the_chance_is_that_of_the_definition(least, num_clients, cohort):
  found = cohort_sizes.below(least, "poisson", num_clients, cohort)
  np.testing.assert_allclose(found, _exact(least, num_clients, cohort), atol=1e-12)
  all_rounds = cohort_sizes.ever(found, 100)
  np.testing.assert_allclose(all_rounds, 1 - (1 - found) ** 100, atol=1e-12)


@pytest.mark.parametrize("name", [n for n in SECURE_SUMS if n != "none"])
def test_every_sum_is_refused_where_a_round_of_the_run_may_well_be_too_small(name):
  """Poisson cohorts of 10 of 100 are; the sizes that the line names are not."""
  error = _refused(
    secure_sum=name, clients_per_round=10.0, **{"privacy.sampler": "poisson"}
  )
  assert error is not None and error.field == "secure_sum" and "fixed_size" in error.hint
  assert _refused(secure_sum=name, clients_per_round=10.0) is None
  enough = float(error.hint.rpartition("=")[2].split()[0])
  more = {"privacy.sampler": "poisson", "secure_sum": name}
  assert _refused(clients_per_round=enough, **more) is None
  assert _refused(clients_per_round=enough - 1, **more) is not None


@pytest.mark.parametrize("name", _ROBUST)
def test_every_robust_aggregator_is_refused_where_it_tolerates_nobody(name):
  row = described.aggregators()[name]
  least = next(n for n in itertools.count(1) if row.tolerates(n, **row.options) > 0)
  fixed = lambda n: _refused(aggregator=name, clients_per_round=float(n))
  assert fixed(least) is None
  for small in {1, least - 1}:
    error = fixed(small)
    assert error is not None and error.field.startswith("aggregator")
  error = _refused(
    aggregator=name, clients_per_round=float(least), **{"privacy.sampler": "poisson"}
  )
  assert error is not None and "fixed_size" in error.hint


@pytest.mark.parametrize(
  "more",
  [
    {"aggregator": {"name": "trimmed_mean", "trim": 0.0}},
    {"aggregator": {"name": "krum", "num_byzantine": 0}},
    {"compression": {"name": "top_k", "share": 1.0}},
  ],
  ids=str,
)
def test_an_option_that_does_nothing_is_refused_by_name(more):
  error = _refused(clients_per_round=20.0, **more)
  ((section, chosen),) = more.items()
  (option,) = set(chosen) - {"name"}
  assert error is not None and error.field == f"{section}.{option}"


def test_a_mean_needs_no_number_of_clients():
  assert _refused(clients_per_round=0.5, **{"privacy.sampler": "poisson"}) is None


def test_drop_outs_that_leave_no_round_are_refused_and_others_are_simulated():
  summed = lambda prob: {"name": "secagg", "dropout_prob": prob}
  assert _refused(clients_per_round=20.0, secure_sum=summed(0.3)) is None
  error = _refused(clients_per_round=20.0, secure_sum=summed(0.95))
  assert error is not None and error.field == "secure_sum.dropout_prob"


# --- the boundary that aggregators state, against what they do

_MADE = {name: row.make(**row.options) for name, row in described.aggregators().items()} | {
  "multi-krum": federated.krum(1, num_selected=9),
  "krum of 3": federated.krum(3),
  "secure": secure.secure_mean(secure.sums.PlainSum(min_survivors=4), Encoding(64)),
}


def _algorithm(aggregator):
  loss = lambda w, x: 0.5 * jnp.sum((w - x) ** 2)
  return federated.fed_avg(
    loss, optax.sgd(0.5), aggregator=aggregator, key=jax.random.key(0)
  )


def test_every_aggregator_of_configs_is_walked():
  assert set(_MADE) >= set(AGGREGATORS)


@pytest.mark.cases(slow=["krum", "krum of 3", "multi-krum"])
@pytest.mark.parametrize("name", _MADE)
def test_the_fewest_clients_are_enough_and_one_fewer_moves_nothing(name):
  """Where a round is refused, the next one goes on."""
  aggregator = _MADE[name]
  bare = _algorithm(aggregator)
  algorithm = secure.forgiving(bare)
  state = algorithm.init(jnp.ones(2))
  cohort = lambda n: federated.from_batches([np.full((1, 2), 3.0, np.float32)] * n)
  least = aggregator.min_clients
  if least > 1:
    with pytest.raises(RoundRefused):
      bare.round(state, cohort(least - 1))
    after, info = algorithm.round(state, cohort(least - 1))
    np.testing.assert_array_equal(after.params, state.params)
    assert int(info.rounds_refused) == 1 and int(info.left_out) == least - 1
    assert int(info.num_clients) == 0 and int(after.round) == 1
    state = after
  after, info = algorithm.round(state, cohort(least))
  assert np.all(np.abs(np.asarray(after.params) - 2.0) < 0.01)
  assert int(info.rounds_refused) == 0 and int(info.num_clients) == least
