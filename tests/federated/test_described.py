"""What an algorithm or an aggregator states of itself is what it does."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dpjax import federated
from dpjax.auditing.games import silos
from dpjax.experiments.kinds.federated import config
from dpjax.experiments.kinds.federated.config import FedConfig
from dpjax.federated import algorithms, described
from dpjax.federated.client import uniform
from tests.federated import problems, registry
from tests.refuses import refuses

_ROWS = described.algorithms()
_FAST = {"client_tx": optax.sgd(0.1), "server_tx": optax.sgd(1.0)}


def _built(row, **changes):
  """The algorithm by its own facts; a change to None leaves an argument out."""
  numbers = described.RunNumbers(
    num_clients=registry.NUM_CLIENTS,
    expected_cohort=registry.DIVISOR,
    client_learning_rate=0.1,
    client_momentum=0.0,
  )
  given = {"key": registry.KEY, "map_clients": federated.loop_clients(), **changes}
  options = {**row.from_run(numbers), **row.played, **given}
  options = {name: value for name, value in options.items() if value is not None}
  optimizers = [_FAST[name] for name in row.optimizers]
  return row.make(problems.quadratic, *optimizers, **options)


def _started(row, algorithm):
  return registry.start(row.name, algorithm)


def _cohort(batch_size=None):
  return federated.from_batches(problems.ragged((4, 2, 3), width=3), batch_size=batch_size)


def test_every_algorithm_states_its_facts():
  assert set(_ROWS) == registry.made_here() - {"federated"}


def test_a_later_algorithm_is_found_by_its_line(monkeypatch):
  @described.algorithm(client="as fed_avg", server="as fed_avg", source="nobody")
  def gentle_avg(loss_fn, client_tx, server_tx=None, **options):
    return federated.fed_avg(loss_fn, client_tx, server_tx, **options)

  package = algorithms
  lines = dict(described._lazy.public_names(package.__name__))
  monkeypatch.setattr(package, "gentle_avg", gentle_avg, raising=False)
  monkeypatch.setitem(
    described._lazy._LISTED, package.__name__, {**lines, "gentle_avg": (__name__, "")}
  )
  assert described.algorithms()["gentle_avg"].source == "nobody"
  described._ALGORITHMS.pop(gentle_avg)


def test_silos_play_every_algorithm_that_keeps_records_private():
  assert {name for name, row in _ROWS.items() if row.records} == set(silos.ALGORITHMS)


def test_an_option_without_a_default_stands_in_played():
  def fed_l1(loss_fn, *optimizers, mu, key, **options):
    return federated.fed_avg(loss_fn, *optimizers, key=key, **options)

  facts = {"client": "adds mu * |w|", "server": "as fed_avg", "source": "nobody"}
  with refuses("played", value={"lam": 1.0}):
    described.algorithm(**facts, played={"lam": 1.0})(fed_l1)
  described.algorithm(**facts, played={"mu": 0.1})(fed_l1)
  assert described._ALGORITHMS.pop(fed_l1).played == {"mu": 0.1}


@pytest.mark.parametrize("row", _ROWS.values(), ids=_ROWS)
class TestFacts:
  def test_options_and_what_follows_from_a_run_are_arguments(self, row):
    taken = inspect.signature(row.make).parameters
    takes_any = any(each.kind is each.VAR_KEYWORD for each in taken.values())
    assert set(row.options or ()) <= set(taken)
    assert takes_any or set(row.played) <= set(taken)
    assert set(row.checks) <= set(row.options or ())
    assert _built(row).round is not None

  def test_clients_keep_something_where_it_says_so(self, row):
    assert (_started(row, _built(row)).memories is not None) == row.keeps_state

  def test_it_takes_a_wrapped_client_where_it_says_so(self, row):
    seen = []

    def wrap(client):
      seen.append(client)
      return client

    if row.wraps_clients:
      _built(row, wrap=wrap)
      assert seen
    else:
      with pytest.raises(TypeError, match="wrap"):
        _built(row, wrap=wrap)

  def test_a_message_is_one_difference_where_it_says_so(self, row):
    messages = []
    mean = federated.weighted_mean()

    def init(message):
      messages.append(message)
      return mean.init(message)

    # Without what only privacy needs, whose absence some send more for.
    needed = {row.private_if: None} if row.private_if else {}
    algorithm = _built(row, aggregator=mean._replace(init=init), **needed)
    state = _started(row, algorithm)
    shapes = jax.tree.map(jnp.shape, state.params)
    alone = set(messages[0]) == {"delta"}
    like_params = alone and jax.tree.map(jnp.shape, messages[0]["delta"]) == shapes
    assert like_params == row.one_difference

  def test_a_private_aggregator_needs_what_it_says(self, row):
    private = registry.PRIVATE["flat"]()
    _built(row, aggregator=private)
    if row.private_if:
      with refuses(row.private_if):
        _built(row, aggregator=private, **{row.private_if: None})


# Each compiles a round of its own; these three differ most.
_SOME = ("fed_avg", "fed_nova", "scaffold")


@pytest.mark.parametrize(
  "row",
  [
    pytest.param(row, id=name, marks=[] if name in _SOME else pytest.mark.long)
    for name, row in _ROWS.items()
  ],
)
class TestFactsOfRounds:
  @pytest.mark.cases(quick=["scaffold"], long=...)
  def test_weights_count_where_it_takes_them(self, row):
    if not row.weighted:
      with pytest.raises(TypeError, match="weighting"):
        _built(row, weighting=federated.by_examples)
      return
    ends = []
    for weighting in (uniform, federated.by_examples):
      algorithm = _built(row, weighting=weighting)
      state, _ = algorithm.round(_started(row, algorithm), _cohort())
      ends.append(np.concatenate([*map(np.ravel, jax.tree.leaves(state.params))]))
    assert not np.allclose(ends[0], ends[1])

  @pytest.mark.cases(slow=["fed_nova"], long=...)
  def test_local_batches_count_where_clients_take_steps(self, row):
    algorithm = _built(row)
    ends = []
    for batch_size in (None, 1):
      state, _ = algorithm.round(_started(row, algorithm), _cohort(batch_size))
      ends.append(np.concatenate([*map(np.ravel, jax.tree.leaves(state.params))]))
    assert np.allclose(ends[0], ends[1]) != row.local_steps


_AGGREGATORS = described.aggregators()


@pytest.mark.parametrize("row", _AGGREGATORS.values(), ids=_AGGREGATORS)
class TestAggregators:
  def _of(self, row, messages, weights=None):
    made = row.make(**row.options)
    messages = jnp.asarray(messages, jnp.float32)
    mask = jnp.ones(len(messages), bool)
    return np.asarray(made.update(messages, mask, made.init(messages[0]), weights)[0])

  @pytest.mark.cases(slow=["trimmed_mean"], long=...)
  def test_weights_count_where_it_says_so(self, row):
    messages = np.random.default_rng(0).normal(size=(11, 3))
    weights = jnp.ones(11).at[4].set(9.0)
    plain = self._of(row, messages)
    assert np.allclose(plain, self._of(row, messages, weights)) != row.weighted
    assert np.allclose(plain, messages.mean(axis=0), atol=1e-6) == row.is_mean

  @pytest.mark.cases(long=["krum", "geometric_median"])
  def test_it_stands_up_to_as_many_as_it_says(self, row):
    messages = np.random.default_rng(1).normal(size=(11, 3))
    many = row.tolerates(11, **row.options)
    assert many < 11 / 2
    messages[:many] = 1e9
    assert np.abs(self._of(row, messages)).max() < 1e6
    if not many:
      messages[0] = 1e9
      assert np.abs(self._of(row, messages)).max() > 1e6

  def test_it_is_a_word_of_a_config(self, row):
    assert type(FedConfig(aggregator=row.name).aggregator).function is row.make
    assert row.source and row.stands_up_to and not row.make(**row.options).private


def test_an_aggregator_of_a_users_own_has_no_facts():
  own = FedConfig(aggregator="mine:median", algorithm="mine:signs")
  assert config.aggregation_of(own) is None
  assert config.algorithm_of(own).name == "mine:signs"
