"""What finished runs cost together: against closed forms, exact aborts, and edited folders."""

import dataclasses
import itertools
import json
import math
import pathlib

import dp_accounting as dpa
import hypothesis
import pytest
from hypothesis import strategies as st
from scipy import integrate, stats

from dpjax import accounting, sampling
from dpjax.accounting.epsilon import privacy_profile
from dpjax.accounting.event_kinds.random_allocation import RandomAllocationDpEvent
from dpjax.experiments.checks import several_runs
from dpjax.experiments.run import loop, workdir
from dpjax.experiments.sweeps import cost
from dpjax.experiments.sweeps.cost import FinishedRun
from dpjax.validate import UserError
from tests.checks import finished_runs
from tests.refuses import refuses

_DELTA = 1e-5


def _gaussian(name, multiplier, **fields):
  event = accounting.compose(accounting.gaussian_event(multiplier), 1)
  return FinishedRun(
    name, accounting.epsilon(event, delta=_DELTA), _DELTA, event=event, **fields
  )


def _poisson(name, steps, **fields):
  step = dpa.PoissonSampledDpEvent(0.1, dpa.GaussianDpEvent(1.0))
  event = accounting.compose(step, steps)
  return FinishedRun(
    name, accounting.epsilon(event, delta=_DELTA), _DELTA, event=event, **fields
  )


@pytest.mark.parametrize("multipliers", [(2.0, 2.0), (1.0, 3.0, 5.0)])
def test_gaussian_runs_cost_what_one_with_their_joint_noise_costs(multipliers):
  runs = [_gaussian(str(i), multiplier) for i, multiplier in enumerate(multipliers)]
  total = cost.together(runs)
  joint = 1 / math.sqrt(sum(multiplier**-2 for multiplier in multipliers))
  exact = accounting.epsilon(dpa.GaussianDpEvent(joint), delta=_DELTA)
  assert exact - 1e-6 <= total.epsilon <= exact * 1.002
  assert total.delta == _DELTA and total.accountant == "pld" and total.added == ()
  assert math.isclose(total.sum_epsilon, sum(run.epsilon for run in runs))
  assert total.epsilon <= total.sum_epsilon


def test_order_does_not_matter_and_one_more_run_never_costs_less():
  runs = [_poisson("a", 50), _poisson("b", 200), _gaussian("c", 4.0)]
  totals = [cost.together(order) for order in itertools.permutations(runs)]
  assert len({round(total.epsilon, 6) for total in totals}) == 1
  grown = [cost.together(runs[:count]).epsilon for count in (1, 2, 3)]
  assert grown == sorted(grown) and grown[0] < grown[2]
  assert cost.together(runs, delta=1e-6).epsilon > totals[0].epsilon


def test_a_run_without_a_ledger_is_added_as_it_is_stated():
  known = _poisson("a", 50)
  stated = FinishedRun("b", 1.5, 1e-6)
  known = [known, dataclasses.replace(known, name="c")]
  total = cost.together([*known, stated])
  assert total.added == ("b",) and total.accountant == "pld"
  assert math.isclose(total.epsilon, cost.together(known).epsilon + 1.5)
  assert math.isclose(total.delta, 1.1e-5)
  alone = cost.together([stated, dataclasses.replace(stated, name="c")])
  assert (alone.epsilon, alone.delta, alone.accountant) == (3.0, 2e-6, "")
  with refuses("delta", value=1e-06):
    cost.together([*known, stated], delta=1e-6)


def test_runs_that_no_accountant_knows_together_are_added():
  """Under replace_one fixed batches compose with each other, and not with these releases."""
  step = dpa.SampledWithoutReplacementDpEvent(100, 10, dpa.GaussianDpEvent(4.0))
  fixed = FinishedRun(
    "a", 1.0, _DELTA, relation="replace_one", event=accounting.compose(step, 5)
  )
  allocated = RandomAllocationDpEvent(num_steps=5, noise_multiplier=4.0)
  other = FinishedRun("c", 1.5, _DELTA, relation="replace_one", event=allocated)
  total = cost.together([fixed, dataclasses.replace(fixed, name="b"), other])
  both = cost.together([fixed, dataclasses.replace(fixed, name="b")])
  assert total.added == ("c",) and total.accountant == "pld"
  assert math.isclose(total.epsilon, both.epsilon + 1.5, rel_tol=0.01)
  assert "Added as stated, not composed: c" in cost.statement([fixed, other], total)


def test_one_run_costs_what_it_states_and_small_deltas_are_summed():
  run = _poisson("a", 50)
  assert cost.together([run]).epsilon == run.epsilon
  tiny = [dataclasses.replace(run, name=name, epsilon=4.0, delta=1e-13) for name in "abc"]
  total = cost.together(tiny)
  # PLD knows no such delta: RDP or the sum.
  assert total.accountant in ("rdp", "") and total.epsilon <= 12.0
  assert cost.together([FinishedRun("a", 1.0, 1e-5)] * 3).delta == 3e-5
  with refuses("delta"):
    cost.together([FinishedRun("a", 1.0, 0.6)] * 2)


def test_one_run_has_an_epsilon_at_another_delta_by_its_ledger():
  run = _gaussian("a", 2.0)
  other = cost.together([run], delta=1e-7)
  exact = accounting.epsilon(run.event, delta=1e-7)
  assert other.epsilon == pytest.approx(exact, rel=1e-6) and other.epsilon > run.epsilon
  assert other.delta == 1e-7 and other.added == ()


def test_a_delta_near_the_sum_costs_no_more_than_the_sum():
  stated, run = FinishedRun("b", 1.0, 1e-3), _poisson("a", 50)
  total = cost.together([run, dataclasses.replace(run, name="c"), stated], delta=0.5)
  assert total.epsilon <= total.sum_epsilon


@pytest.mark.parametrize(
  ("changes", "field"),
  [
    ({"relation": "replace_one"}, "runs"),
    ({"unit": "user"}, "runs"),
    ({"noise_keys": frozenset({"k"})}, "runs"),
  ],
)
def test_runs_without_a_common_guarantee_are_one_line(changes, field):
  one = _gaussian("a", 2.0, noise_keys=frozenset({"k", "m"}))
  other = dataclasses.replace(one, name="b", noise_keys=frozenset({"n"}))
  cost.together([one, other])
  with refuses(field) as caught:
    cost.together([one, dataclasses.replace(other, **changes)])
  assert len(str(caught.value).splitlines()) == 1 and len(str(caught.value)) < 300


def test_users_that_are_dealt_otherwise_have_no_common_epsilon():
  users = [
    _gaussian(name, 2.0, unit="user", unit_owns_records=True, population=name)
    for name in "ab"
  ]
  with refuses("runs"):
    cost.together(users)
  with refuses("runs"):
    cost.together([])


# --- aborts


def _divergences(others, capacity, prob, noise, epsilon):
  """Exact hockey-sticks of one step with and without a record, and the chance of a full batch.

  The worst case: what the other records add tells how many of them were taken. Given their
  number, with the record in the data (prob of it being taken) or not, the step releases a noisy 0
  or 1, or aborts above the capacity.
  """
  taken = stats.binom(others, prob)
  rate = math.exp(epsilon)
  without = lambda x: stats.norm.pdf(x, 0, noise)
  with_it = lambda x: (1 - prob) * without(x) + prob * stats.norm.pdf(x, 1, noise)

  def stick(first, second):
    above = lambda x: max(first(x) - rate * second(x), 0.0)
    return integrate.quad(above, -12 * noise, 12 * noise, limit=400, points=[0.0, 1.0])[0]

  # A record that is taken beside a full batch aborts, and otherwise leaves no trace.
  at_capacity = (prob + max(1 - prob - rate, 0.0), max(1 - rate * (1 - prob), 0.0))
  below = taken.cdf(capacity - 1)
  sticks = [
    below * stick(*pair) + taken.pmf(capacity) * edge
    for pair, edge in zip(((with_it, without), (without, with_it)), at_capacity)
  ]
  return max(sticks), taken.sf(capacity - 1)


@pytest.mark.parametrize("epsilon", [0.1, 0.5, 1.0, 2.0])
@pytest.mark.parametrize(("others", "capacity", "prob"), [(4, 3, 0.5), (6, 2, 0.2)])
def test_aborts_cost_the_chance_that_the_others_fill_a_batch(
  epsilon, others, capacity, prob
):
  exact, full = _divergences(others, capacity, prob, noise=1.0, epsilon=epsilon)
  step = dpa.PoissonSampledDpEvent(prob, dpa.GaussianDpEvent(1.0))
  ideal = float(privacy_profile(step)([epsilon])[0])
  assert exact <= ideal + full + 1e-9
  # Without the aborts the bound would be untrue at a large epsilon, by much of their chance.
  if epsilon == 2.0:
    assert exact > ideal + 0.1 * full


def test_the_chance_of_a_full_batch_follows_from_that_of_an_abort():
  step = dpa.PoissonSampledDpEvent(0.25, dpa.GaussianDpEvent(1.0))
  chance = lambda event, steps: several_runs._full_prob(event, 1e-6, num_steps=steps)
  whole = accounting.compose(step, 9)
  assert chance(whole, 9) == 4e-6
  # Statistics beside the steps have no batches.
  assert chance(dpa.ComposedDpEvent([whole, dpa.GaussianDpEvent(8.0)]), 9) == 4e-6
  # A step that is not sampled so may have a batch of another kind.
  assert chance(whole, 10) == chance(dpa.GaussianDpEvent(1.0), 1) == 1.0
  assert several_runs._full_prob(whole, 0.0, num_steps=9) == 0.0
  # One more record than the others: what the plans bound.
  others, capacity, prob = 40, 12, 0.25
  abort = stats.binom.sf(capacity, others + 1, prob)
  assert stats.binom.sf(capacity - 1, others, prob) <= abort / prob


def test_aborts_take_their_part_of_delta_and_cost_all_where_they_are_likely():
  free = [_poisson(name, 100) for name in "ab"]
  some = [
    dataclasses.replace(run, abort_prob=1e-8, full_prob=1e-7, epsilon=run.epsilon + 0.01)
    for run in free
  ]
  none, little = cost.together(free), cost.together(some)
  assert none.epsilon < little.epsilon < none.epsilon * 1.05
  likely = [dataclasses.replace(run, abort_prob=1e-3, full_prob=1e-2) for run in free]
  summed = cost.together(likely)
  assert summed.accountant == "" and summed.delta == 2 * _DELTA
  assert math.isclose(summed.epsilon, sum(run.epsilon for run in free))


# --- folders


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
  at = tmp_path_factory.mktemp("runs")
  return [finished_runs.write(at / "first", 0), finished_runs.write(at / "second", 1)]


@pytest.mark.slow
def test_trained_runs_are_read_by_their_ledgers(tmp_path):
  for seed in (0, 1):
    loop.train(
      dataclasses.replace(finished_runs.CONFIG, seed=seed), str(tmp_path / str(seed))
    )
  read = several_runs.read([str(tmp_path / "0"), str(tmp_path / "1")])
  assert all(run.event is not None and 0 < run.abort_prob < 1e-5 for run in read)
  total = cost.together(read)
  assert max(run.epsilon for run in read) < total.epsilon < 0.9 * total.sum_epsilon


def _result(folder):
  return json.loads((folder / "result.json").read_text())


def _copy(folder, to, **changes):
  """A folder with other values in its result; its digest is left as it was."""
  to.mkdir(parents=True)
  for name in ("config.json", "result.json"):
    (to / name).write_text((folder / name).read_text())
  (to / "result.json").write_text(json.dumps({**_result(folder), **changes}))
  return to


def _sealed(folder, to, config=None, **changes):
  """A folder with other values and a digest that fits: it is public, so anybody can make it."""
  _copy(folder, to)
  held = json.loads((folder / "config.json").read_text()) | (config or {})
  result = {**_result(folder), **changes}
  result["run_sha256"] = workdir.seal_of(held, result)
  (to / "config.json").write_text(json.dumps(held))
  (to / "result.json").write_text(json.dumps(result))
  return to


def test_folders_are_read_by_their_ledgers(runs):
  read = several_runs.read(map(str, runs))
  assert [run.epsilon for run in read] == [_result(folder)["epsilon"] for folder in runs]
  assert all(run.event is not None and 0 < run.abort_prob < 1e-5 for run in read)
  total = cost.together(read)
  assert max(run.epsilon for run in read) < total.epsilon < 0.9 * total.sum_epsilon
  text = cost.statement(read, total)
  assert accounting.upper(total.epsilon) in text and "quote the sum" in text


def test_a_run_that_cannot_abort_is_read_by_its_ledger_too(tmp_path):
  """All of its delta is left for the steps, and its result does not write that twice."""
  sampler = sampling.FixedSizeSampler(batch_size=20, num_examples=200)
  folder = finished_runs.write(tmp_path / "run", 0, sampler)
  assert "accounted_delta" not in _result(folder)
  (run,) = several_runs.read([str(folder)])
  assert run.event is not None and run.abort_prob == 0


def test_a_folder_of_a_sweep_stands_for_its_finished_runs(runs, tmp_path):
  for folder in runs:
    _copy(folder, tmp_path / "sweep" / "points" / folder.name)
  (tmp_path / "sweep" / "points" / "unfinished").mkdir()
  found = several_runs.read([str(tmp_path / "sweep")])
  assert [pathlib.Path(run.name).name for run in found] == ["first", "second"]


def test_what_is_no_finished_run_is_one_line(runs, tmp_path):
  first = str(runs[0])
  again = str(_copy(runs[0], tmp_path / "again"))
  (tmp_path / "empty").mkdir()
  # The last is not the result of its config.json.
  better = str(_copy(runs[0], tmp_path / "better", epsilon=0.1))
  nowhere, empty = str(tmp_path / "nowhere"), str(tmp_path / "empty")
  for folders in ([nowhere], [empty], [first, first + "/"], [""], [better]):
    with refuses("runs") as caught:
      several_runs.read(folders)
    assert len(str(caught.value).splitlines()) == 1
  # A copy is the same release: its noise is that of the first.
  with refuses("runs"):
    cost.together(several_runs.read([first, again]))


def test_what_an_attack_shows_has_no_epsilon(runs, tmp_path):
  folder = _sealed(runs[0], tmp_path / "attack", config={"attack": {"name": "membership"}})
  with refuses("runs"):
    several_runs.read([str(folder)])


@pytest.mark.parametrize(
  ("changes", "field"),
  [
    ({"epsilon": 10**400}, "runs"),
    ({"failed_assumptions": 5}, "runs"),
    ({"ledger": {"version": 2, "charges": 5}}, "runs"),
    ({"neighboring_relation": "foo"}, "runs"),
    ({"neighboring_relation": "replace_one"}, "runs"),
    ({"delta": 2.0}, "runs"),
    ({"epsilon_kind": "simulated"}, "runs"),
  ],
)
def test_strange_content_with_a_digest_that_fits_is_one_line(
  runs, tmp_path, changes, field
):
  folder = _sealed(runs[0], tmp_path / "run", **changes)
  with refuses(field) as caught:
    several_runs.read([str(folder)])
  assert str(folder) in str(caught.value) and len(str(caught.value).splitlines()) == 1


def test_a_billion_steps_are_believed_at_once(runs, tmp_path):
  result = _result(runs[0])
  result["ledger"]["charges"][0]["num_steps"] = 10**9
  (run,) = several_runs.read([str(_sealed(runs[0], tmp_path / "run", **result))])
  assert run.event is None


@hypothesis.settings(max_examples=150)
@hypothesis.given(
  name=st.sampled_from(
    ["epsilon", "delta", "ledger", "accounted_delta", "accountant", "epsilon_kind", "unit"]
  ),
  value=st.one_of(
    st.none(),
    st.booleans(),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.text(max_size=8), st.integers(), max_size=2),
  ),
)
def test_any_value_is_a_run_or_one_line(runs, name, value):
  # The digest is believed here, so that values are looked at.
  held = _result(runs[0])
  sealed = lambda *args: held["run_sha256"]
  read = several_runs.writers.read_json
  swapped = lambda path: {**read(path), **({name: value} if "result" in str(path) else {})}
  with pytest.MonkeyPatch.context() as patched:
    patched.setattr(workdir, "seal_of", sealed)
    patched.setattr(several_runs.writers, "read_json", swapped)
    try:
      (run,) = several_runs.read([str(runs[0])])
      total = cost.together([run])
      # What cannot be checked against the ledger is never better than what is stated.
      assert run.event is not None or total.epsilon == run.epsilon
    except UserError as error:
      assert len(str(error).splitlines()) == 1 and len(str(error)) < 400
