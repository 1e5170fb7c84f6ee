"""An event is one class that holds all of its accounting; a user may add one."""

import dataclasses
import math

import dp_accounting as dpa
import numpy as np
import pytest

from dpjax import accounting
from dpjax.accounting import event_kinds, proved
from dpjax.accounting.event_kinds import elements, kind, noisy_sum
from dpjax.validate import UserError
from tests.refuses import refuses


@dataclasses.dataclass(frozen=True)
class TwiceDpEvent(dpa.DpEvent):
  """Two Gaussian sums, as one event."""

  noise_multiplier: float


class TwiceKind(kind.EventKind):
  name = "twice"
  event = TwiceDpEvent
  relations = ("add_or_remove_one", "replace_one")

  def elements(self, event):
    return [(event, 1)]

  def _sum(self, part):
    return dpa.GaussianDpEvent(part.noise_multiplier / math.sqrt(2))

  def under(self, part, neighboring_relation):
    exchanged = neighboring_relation == "replace_one"
    return TwiceDpEvent(part.noise_multiplier / 2) if exchanged else part

  def rdp(self, part):
    return kind.kind_of(self._sum(part)).rdp(self._sum(part))

  def pld(self, part, interval):
    return kind.kind_of(self._sum(part)).pld(self._sum(part), interval)

  def grid(self, part):
    return kind.kind_of(self._sum(part)).grid(self._sum(part))

  def describe(self, part, unit):
    return f"two sums over {unit}s"


@pytest.fixture
def twice():
  kind.every_kind()  # before the tables are held, since a file registers its kinds once
  tables = (kind.KINDS, kind._KIND_OF)
  held = [dict(table) for table in tables]
  kind.register(TwiceKind())
  yield TwiceDpEvent(3.0)
  for table, before in zip(tables, held, strict=True):
    table.clear()
    table.update(before)


@pytest.mark.parametrize("relation", TwiceKind.relations)
@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_an_event_of_ones_own_is_accounted_by_its_own_methods(twice, relation, accountant):
  by = {"neighboring_relation": relation, "accountant": accountant, "delta": 1e-5}
  two = accounting.compose(accounting.gaussian_event(3.0), 2)
  assert accounting.epsilon(twice, **by) == pytest.approx(
    accounting.epsilon(two, **by), rel=1e-3
  )
  sampled = accounting.compose(twice, 4)
  assert kind.event_from_json(kind.event_to_json(sampled)) == sampled
  assert "4 x two sums over users" in accounting.privacy_statement(
    sampled, delta=1e-5, unit="user"
  )
  with refuses("event"):
    accounting.epsilon(twice, delta=1e-5, neighboring_relation="replace_special")


def test_it_may_be_registered_again_and_dpjaxs_own_may_not_be_taken_over(twice):
  kind.register(TwiceKind())

  class Free(noisy_sum.GaussianKind):
    def rdp(self, part):
      return np.zeros(len(kind.ORDERS))

  class Renamed(Free):
    name = "free"

  class Claimed(TwiceKind):
    name = "gaussian"

  before = accounting.epsilon(dpa.GaussianDpEvent(1.0), delta=1e-5, accountant="rdp")
  for taken in (Free(), Renamed(), Claimed()):
    with refuses("kind"):
      kind.register(taken)
  after = accounting.epsilon(dpa.GaussianDpEvent(1.0), delta=1e-5, accountant="rdp")
  assert after == before and "free" not in kind.KINDS


def test_every_kind_says_what_accountants_ask_of_it():
  for name, row in kind.every_kind().items():
    assert row.name == name and row.__doc__ and event_kinds.__doc__
    if name == "non_private" or not row.relations:
      continue
    stated = vars(type(row)).keys() | vars(type(row).__mro__[1]).keys()
    assert "describe" in stated, name
    if "pld" in row.accountants:
      assert {"pld", "grid"} <= stated, name


def test_an_event_that_calls_itself_equal_to_another_shares_no_cache(twice):
  class Sly(dpa.DpEvent):
    noise_multiplier = 3.0

    def __eq__(self, other):
      return isinstance(other, (Sly, dpa.GaussianDpEvent))

    def __hash__(self):
      return hash(dpa.GaussianDpEvent(3.0))

  class SlyKind(TwiceKind):
    name = "sly"
    event = Sly

    def rdp(self, part):
      return np.full(len(kind.ORDERS), 1e-9)

    def pld(self, part, interval):
      return kind.kind_of(dpa.GaussianDpEvent(1e3)).pld(dpa.GaussianDpEvent(1e3), interval)

  kind.register(SlyKind())
  for accountant in proved.ACCOUNTANTS:
    by = {"delta": 1e-5, "accountant": accountant}
    assert accounting.epsilon(Sly(), **by) < 0.1
    honest = accounting.epsilon(accounting.gaussian_event(3.0), **by)
    assert honest > 1.2


def test_a_users_event_takes_back_no_cost_and_is_claimed(twice):
  class Refund(TwiceKind):
    name = "refund"
    event = dataclasses.make_dataclass("RefundEvent", [], bases=(dpa.DpEvent,), frozen=True)

    def elements(self, event):
      return [(dpa.GaussianDpEvent(1.0), -1)]

  kind.register(Refund())
  both = dpa.ComposedDpEvent([dpa.GaussianDpEvent(1.0), Refund.event()])
  with refuses("times", value=-1):
    accounting.epsilon(both, delta=1e-5)
  assert "kind: claimed" in accounting.privacy_statement(twice, delta=1e-5)
  # Within another event it is a claim, too.
  stated = elements.StatedDpEvent("add_or_remove_one", dpa.SelfComposedDpEvent(twice, 2))
  assert "kind: claimed" in accounting.privacy_statement(stated, delta=1e-5)
  assert "kind: proved" in accounting.privacy_statement(
    dpa.GaussianDpEvent(1.0), delta=1e-5
  )


def test_what_is_no_kind_is_not_registered():
  for wrong in (TwiceKind, object()):
    with pytest.raises(UserError, match="must be an object of an EventKind"):
      kind.register(wrong)


@pytest.mark.parametrize(
  ("kind_name", "numbers", "field"),
  [
    ("bounded_contribution", (0.9, 900, 1.0), "max_contribution"),
    ("bounded_contribution", (2.0, 1, 1.0), "sampling_prob"),
    ("discrete_gaussian", (-1.0,), "noise_multiplier"),
    ("k_out_of_t", (3, 4, 1.0), "num_selected"),
    ("random_allocation", (0, 1.0), "num_steps"),
    ("skellam", (0.0, 1.0, 1.0), "variance"),
    ("smooth_sensitivity", (1.0, 1.0, "some"), "neighboring_relation"),
  ],
)
def test_an_event_of_dpjax_checks_its_numbers_where_it_is_made(kind_name, numbers, field):
  with refuses(field):
    kind.every_kind()[kind_name].event(*numbers)
