"""The epsilon of a row is computed with the row: no curve in silence before the first step."""

import importlib
import itertools
from typing import NamedTuple

import pytest

from configs import quickstart as central
from configs.fed import quickstart as fed
from dpjax.experiments.config import fields
from dpjax.experiments.kinds.central import build
from dpjax.experiments.kinds.federated import build as federate_build
from dpjax.experiments.run import loop, writers
from tests.runs.stops import stop_after

_accountant = importlib.import_module("dpjax.accounting.epsilon")


class _Kind(NamedTuple):
  """A kind of run."""

  config: object
  go: object  # (config, workdir)
  steps: str  # field


_CENTRAL = {
  "grad_method": "vmap", "checkpoint_every": 4, "model.name": "linear", "model.options": {},
  "data.limit": 400, "privacy.epsilon": None, "privacy.noise_multiplier": 1.0,
}  # fmt: skip
_FED = {
  "checkpoint_every": 4, "data.limit": 150, "partition.num_clients": 30,
  "clients_per_round": 6.0, "local.batch_size": 4, "local.epochs": 1,
  "privacy.delta": 1e-3, "privacy.epsilon": None, "privacy.noise_multiplier": 1.0,
}  # fmt: skip


def _kind(name, **more):
  start, small, go, steps = {
    "central": (central, _CENTRAL, loop.train, "num_steps"),
    "federated": (fed, _FED, loop.train, "num_rounds"),
  }[name]
  config = start.get_config()
  return _Kind(fields.replace_all(fields.replace_all(config, small), more), go, steps)


@pytest.fixture
def counted(monkeypatch):
  """Counts: compositions so far; `at`: how many there were at the first step, at each row."""
  counts = {"now": 0, "first": None, "rows": []}
  real = {name: getattr(_accountant, name) for name in ("_pld_epsilon", "rdp_of")}

  def counting(name):
    def call(*arguments):
      counts["now"] += 1
      return real[name](*arguments)

    return call

  for name in real:
    monkeypatch.setattr(_accountant, name, counting(name))
  progress, write = writers.Progress, writers.MetricsWriter.write

  def started(*arguments, **options):
    counts["first"] = counts["now"]
    return progress(*arguments, **options)

  def written(writer, step, values):
    counts["rows"].append(counts["now"])
    return write(writer, step, values)

  monkeypatch.setattr(writers, "Progress", started)
  monkeypatch.setattr(writers.MetricsWriter, "write", written)
  return counts


def _counted(counts, kind, workdir):
  counts.update(now=0, first=None, rows=[])
  return kind.go(kind.config, workdir), dict(counts)


@pytest.mark.long
@pytest.mark.parametrize("name", ["central", "federated"])
@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_one_accounting_for_a_row_and_none_of_them_before_the_first_step(
  counted, tmp_path, name, accountant
):
  found = {}
  for every in (1, 12):
    kind = _kind(name, eval_every=every, **{"privacy.accountant": accountant})
    kind = kind._replace(config=fields.replace(kind.config, kind.steps, 12))
    found[every] = _counted(counted, kind, tmp_path / str(every))[1]
  rows, whole = found[1]["rows"], found[12]["rows"]
  assert len(rows) == 12 and len(whole) == 1
  # Up to the first row, however many there will be: its own composition, and that of the whole
  # plan, which says how much of delta is left for draws above the capacity.
  assert found[1]["first"] == found[12]["first"] > 0 and 1 <= rows[0] - whole[0] <= 2
  # Each row costs one composition of what one step is; the last was known before.
  assert [b - a for a, b in itertools.pairwise(rows)] == [1] * 10 + [0]


def _curve(name, config, steps):
  """By the plan itself, all points at once."""
  kind = federate_build if name == "federated" else build
  guarantee = kind.assemble(config).guarantee
  return [guarantee.curve(step) for step in steps]


@pytest.mark.cases(long=["federated"])
@pytest.mark.parametrize("name", ["central", "federated"])
def test_a_row_says_what_its_steps_cost_by_the_plan(tmp_path, name):
  kind = _kind(name, eval_every=3)
  kind = kind._replace(config=fields.replace(kind.config, kind.steps, 8))
  result = kind.go(kind.config, tmp_path / "run")
  rows = writers.read_metrics(tmp_path / "run")
  assert [row["step"] for row in rows] == [3, 6, 8]
  expected = list(_curve(name, kind.config, [3, 6, 8]))
  assert [row["epsilon"] for row in rows] == pytest.approx(expected, rel=1e-9)
  assert rows[-1]["epsilon"] == pytest.approx(result["epsilon"], rel=1e-9)
  assert result["num_steps"] == 8


@pytest.mark.long
@pytest.mark.parametrize("name", ["central", "federated"])
def test_a_resumed_run_accounts_for_the_rows_that_are_left(
  counted, tmp_path, name, monkeypatch
):
  kind = _kind(name, eval_every=1)
  kind = kind._replace(config=fields.replace(kind.config, kind.steps, 12))
  stop_after(monkeypatch, 9)
  with pytest.raises(loop.Interrupted):
    _counted(counted, kind, tmp_path / "run")
  rows = _counted(counted, kind, tmp_path / "run")[1]["rows"]
  assert [b - a for a, b in itertools.pairwise(rows)] == [1, 0]  # rows 10, 11, 12
