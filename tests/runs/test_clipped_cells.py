"""A run that reads a table counts the cells that are not as declared; a release does not."""

import json

import numpy as np
import pytest

from dpjax.data import tables
from dpjax.experiments.config import fields
from dpjax.experiments.config.sections import ExamplesConfig
from dpjax.experiments.run import loop
from tests.runs import small_configs

KEY = "not_private/clipped_cells"
# What `_table` writes: three ages beyond their bounds, two jobs that nobody declared.
COUNTS = {"age": 3, "job": 2}
_DECLARATION = {
  "columns": {
    "age": {"lower": 0, "upper": 100},
    "job": {"values": ["nurse", "smith"], "other": "smith"},
    "sex": {"values": ["f", "m"]},
  },
  "target": {"column": "ill", "values": ["no", "yes"]},
  "split": {"column": "fold", "train": ["a"], "test": ["b"]},
  "ignore": ["who"],
  "num_examples": 300,
}


@pytest.fixture(scope="module")
def table(tmp_path_factory):
  """The path of a table of 300 private and 100 public records of 30 persons."""
  rng = np.random.default_rng(0)
  rows = ["age,job,sex,ill,fold,who"]
  for number in range(400):
    age = 101 + number if number in (1, 2, 350) else rng.integers(0, 100)
    job = "baker" if number in (3, 351) else rng.choice(["nurse", "smith"])
    ill = "yes" if age > 50 else "no"
    fold = "a" if number < 300 else "b"
    rows.append(f"{age},{job},{rng.choice(['f', 'm'])},{ill},{fold},p{number % 30}")
  path = tmp_path_factory.mktemp("table") / "people.csv"
  path.write_text("\n".join(rows) + "\n")
  path.with_suffix(".json").write_text(json.dumps(_DECLARATION))
  return path


def _of_section(kind, **more):
  """A function from a table to a config with a section about data, whose changes are `more`."""

  def config(path):
    on_table = {"data.name": str(path), "data.limit": None, "diagnostics": True}
    model = {"model.name": "linear", "model.options": {}}
    return fields.replace_all(kind()[0], {**on_table, **model, **more})

  return config


def _pate(**more):
  more |= {"num_components": 2}
  return lambda path: small_configs.pate(data=ExamplesConfig(str(path)), **more)[0]


def _relevance(**more):
  def config(path):
    return fields.replace_all(
      small_configs.relevance()[0], {"data.name": str(path), **more}
    )

  return config


_NATURAL = {
  "partition": "natural",
  "partition.client_id": "who",
  "data.num_users": 30,
}


@pytest.mark.cases(
  slow=[
    "federated natural",
    "federated release",
    "least squares",
    "federated",
    "central without diagnostics",
    "central release",
    "pate",
    "central",
    "relevance",
  ]
)
@pytest.mark.parametrize(
  "make, shown",
  [
    (_of_section(small_configs.central), True),
    (_of_section(small_configs.central, diagnostics=False), False),
    (_of_section(small_configs.central, release=True), False),
    (_of_section(small_configs.least_squares), True),
    (_of_section(small_configs.federated), True),
    (_of_section(small_configs.federated, **_NATURAL), True),
    (_of_section(small_configs.federated, release=True), False),
    (_pate(), True),
    (_pate(release=True), False),
    (_relevance(method="dpsgd", **{"data.limit": None}), True),
  ],
  ids=[
    "central", "central without diagnostics", "central release", "least squares", "federated",
    "federated natural", "federated release", "pate", "pate release", "relevance",
  ],
)  # fmt: skip
def test_a_result_counts_by_column(make, shown, table, tmp_path):
  assert tables.clipped_cells(table) == COUNTS
  result = loop.train(make(table), tmp_path / "run")
  assert result.get(KEY) == (COUNTS if shown else None)
  text = (tmp_path / "run" / "result.json").read_text()
  assert (KEY in text) == shown


@pytest.mark.slow
def test_data_that_are_no_table_have_no_counts(tmp_path):
  config = small_configs.central(diagnostics=True)[0]
  assert KEY not in loop.train(config, tmp_path / "run")
