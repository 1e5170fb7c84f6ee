"""Clients that keep something, and samplers in which one takes part in another's place."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy.stats import norm

from dpjax import sampling
from dpjax.federated import central, described, fed_avg, from_batches
from dpjax.federated.client import ClientAlgorithm
from dpjax.federated.round import federated, optimizing_server
from tests.federated import problems, registry
from tests.refuses import refuses

_N = registry.NUM_CLIENTS
# What an algorithm does with what clients keep: sends something of it, or not.
_KEEPS_TO_ITSELF = ("apfl", "hyp_cluster")
_SENDS = ("scaffold", "fed_bn", "mr_mtl", "fed_avg error feedback")


def _central(sampler):
  return central(registry.plan(sampler=sampler), registry.NOISE)


def test_a_client_that_knows_when_it_took_part_undoes_fixed_size_sampling():
  """Two clients, of whom one takes part, in two rounds. The other one sends -1. In round 2 it sends
  1 if it was not in round 1 and the release says that this helps. The event allows delta .01."""
  std, delta = 2.0, 0.01
  plan = registry.plan(
    sampler=sampling.FixedSizeSampler(1, 2), noise_multiplier=std, l2_clip_norm=1.0,
    num_steps=2, delta=delta,
  )  # fmt: skip
  ratio = math.exp(plan.epsilon())
  y = np.linspace(-15, 15, 601)
  step = y[1] - y[0]
  plus, minus = norm.pdf(y, 1, std), norm.pdf(y, -1, std)
  first = (plus + minus) / 2  # the client sends 1, or, exchanged, -1
  # The chance that the other one was not in round 1: of the first client, and when exchanged.
  absent = (plus / 2 / first)[:, None]
  worth = (ratio * minus / first)[:, None]  # what a release of round 2 must be worth
  plain = np.maximum(first - worth * minus, 0).sum(1)
  one = plus / 2 + (absent * plus + (1 - absent) * minus) / 2
  other = minus / 2 + (plus + minus) / 4
  telling = np.maximum(one - worth * other, 0).sum(1)
  total = lambda each: float((first * each).sum() * step**2)
  assert total(plain) < delta  # the event is true of clients without a state
  assert total(np.maximum(plain, telling)) > 1.08 * delta


def test_samplers_say_whether_records_may_keep_a_state():
  """Those that draw each record apart, or claim no secrecy; not one that exchanges records."""
  exchanging = {"fixed_size", "truncated_poisson", "with_replacement", "shuffled"}
  for name, scheme in sampling.registry.SCHEMES.items():
    drawn = [scheme.kind(**settings) for settings in scheme.kind.small]
    some = [sampler for sampler in drawn if sampler.padded_batch_size != 4]
    assert {sampler.proved_with_memory for sampler in some} <= {name not in exchanging}
  assert sampling.FixedSizeSampler(_N, _N).proved_with_memory  # all take part in each step
  assert not sampling.WithReplacementSampler(_N, _N).proved_with_memory


@pytest.mark.parametrize("name", _SENDS)
def test_messages_that_follow_from_a_state_need_clients_drawn_apart(name):
  registry.build(name, _central(sampling.PoissonSampler(0.5, _N)))
  registry.build(name, _central(sampling.FixedSizeSampler(_N, _N)))
  with refuses("sampler", value="fixed_size"):
    registry.build(name, _central(sampling.FixedSizeSampler(2, _N)))


def test_a_users_client_is_taken_to_send_what_it_keeps():
  client = ClientAlgorithm(*[lambda *_: None] * 3)
  of = {"key": registry.KEY, "memory": lambda params: params}
  with refuses("sampler", value="fixed_size"):
    federated(
      client,
      optimizing_server(),
      aggregator=_central(sampling.FixedSizeSampler(2, _N)),
      **of,
    )


def test_a_client_whose_functions_are_exchanged_is_taken_to_send_what_it_keeps():
  def wrap(client):
    return client._replace(finish=lambda received, local: client.finish(received, local))

  of = {"key": registry.KEY, "memory": lambda params: params}
  with refuses("sampler", value="fixed_size"):
    fed_avg(
      problems.network,
      optax.sgd(0.1),
      aggregator=_central(sampling.FixedSizeSampler(2, _N)),
      wrap=wrap,
      **of,
    )


def test_an_emptied_client_contributes_nothing_whatever_it_sends():
  """One that sent a message all the same would be up to two clip norms from its twin."""

  def insists(client):
    def finish(received, local):
      sent, memory, info = client.finish(received, local)
      far = jax.tree.map(lambda leaf: leaf + 9.0, sent.message)
      return sent._replace(message=far, weight=jnp.float32(1)), memory, info

    return client._replace(finish=finish)

  plan = registry.plan(neighboring_relation="replace_special", noise_multiplier=1e-6)
  after = []
  for wrap in (None, insists):
    algorithm = fed_avg(
      lambda w, x: jnp.sum((w - x) ** 2),
      optax.sgd(0.1),
      aggregator=central(plan, registry.NOISE),
      wrap=wrap,
      key=registry.KEY,
    )
    state = algorithm.init(jnp.zeros(1))
    after.append(algorithm.round(state, from_batches([np.zeros((0, 1))]))[0].params)
  np.testing.assert_array_equal(*after)


@pytest.mark.parametrize("name", _KEEPS_TO_ITSELF)
def test_other_clients_may_keep_a_state_under_any_sampler(name):
  registry.build(name, _central(sampling.FixedSizeSampler(2, _N)))


@pytest.mark.slow
@pytest.mark.parametrize("name", _KEEPS_TO_ITSELF)
def test_who_keeps_a_state_to_itself_sends_the_same_whatever_it_keeps(name):
  algorithm = registry.build(name)
  own = from_batches(problems.ragged((4, 2), width=3), batch_size=2)
  state = registry.start(name, algorithm)
  other = jax.tree.map(lambda leaf: leaf + 1, state.memories.rows(np.arange(2)))
  after = []
  for memories in (state.memories, state.memories.replace_rows(np.arange(2), other)):
    after.append(algorithm.round(state._replace(memories=memories), own)[0].params)
  jax.tree.map(np.testing.assert_array_equal, *after)
  assert jnp.isfinite(jax.tree.leaves(after[0])[0]).all()


def test_every_algorithm_that_keeps_a_state_is_named_here():
  keeping = {name for name, row in described.algorithms().items() if row.keeps_state}
  assert keeping == {*_KEEPS_TO_ITSELF, *_SENDS} - {"fed_avg error feedback"}
