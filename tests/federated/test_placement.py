"""Noise on the server, on the clients, and shared among them, at one guarantee."""

import math

import pytest

from dpjax import accounting
from dpjax.federated.placement import compare_placements, local_epsilon
from tests.refuses import refuses


@pytest.mark.parametrize("num_clients", [1, 25, 1000])
def test_the_clients_noise_costs_the_root_of_their_number(num_clients):
  server, client, distributed = compare_placements(
    epsilon=2.0, delta=1e-5, num_clients=num_clients, l2_clip_norm=0.5, dimension=100
  )
  assert client.mean_std / server.mean_std == pytest.approx(math.sqrt(num_clients))
  assert distributed.mean_std == pytest.approx(server.mean_std)
  assert server.rmse == pytest.approx(10 * server.mean_std)


def test_the_guarantee_is_that_of_twice_the_clip_norm():
  """Replace-one: the noise that gives epsilon 2 for sensitivity 2 C."""
  server, client, _ = compare_placements(epsilon=2.0, delta=1e-5, num_clients=10)
  half = accounting.gaussian_event(server.server_std / 2)  # relative to the sensitivity
  assert accounting.epsilon(half, delta=1e-5) == pytest.approx(2.0, abs=2e-3)
  assert local_epsilon(client.client_std, 1e-5) <= 2.0 + 1e-6


def test_noise_for_those_who_drop_out_is_brought_by_the_rest():
  all_stay = compare_placements(epsilon=1.0, delta=1e-5, num_clients=100)[2]
  some_go = compare_placements(epsilon=1.0, delta=1e-5, num_clients=100, min_survivors=64)[
    2
  ]
  assert some_go.client_std == pytest.approx(all_stay.client_std * 10 / 8)
  survivors = math.sqrt(64) * some_go.client_std
  assert survivors == pytest.approx(compare_placements(
    epsilon=1.0, delta=1e-5, num_clients=100)[0].server_std)  # fmt: skip


def test_rounds_compose():
  assert local_epsilon(10.0, 1e-5, 4) == pytest.approx(local_epsilon(5.0, 1e-5), rel=1e-3)


@pytest.mark.cases(quick=[0], long=...)
@pytest.mark.parametrize(
  "changes", [{"epsilon": 0.0}, {"num_clients": 0}, {"min_survivors": 11}, {"dimension": 0}]
)
def test_wrong_arguments_are_named(changes):
  options = {"epsilon": 1.0, "delta": 1e-5, "num_clients": 10} | changes
  ((field, value),) = changes.items()
  with refuses(field, value=value):
    compare_placements(**options)
