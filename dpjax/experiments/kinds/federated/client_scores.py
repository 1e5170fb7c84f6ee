"""How well each client is served: the accuracy of the model that it uses, on rows of its own.

| clients                          | the model that is scored | scored on                       |
| -------------------------------- | ------------------------ | ------------------------------- |
| of an algorithm with own models  | its own                  | its rows below, else all tests  |
| of other algorithms              | the server's             | its rows below                  |

Rows of its own are those that it held out (`held_out`), or its rows of the test set. A client
without such rows has no score, and is counted. In a run that protects users these scores are named
not private, and a release leaves them out: no guarantee covers models and rows that clients keep,
and which clients there are is a secret. Silos have public names. The server's model may be scored
by silo on the public test set.
"""

from __future__ import annotations

import functools
import math
import pathlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from dpjax.data import Federation
from dpjax.experiments.config.fields import name_of
from dpjax.experiments.kinds.central.facts import shows_data
from dpjax.experiments.kinds.federated import records
from dpjax.experiments.kinds.federated.config import FedConfig, algorithm_of
from dpjax.experiments.plots import redraw
from dpjax.experiments.plots.recipes import Recipe
from dpjax.experiments.run import report, workdir
from dpjax.federated.algorithms.fine_tune import fine_tune
from dpjax.federated.cohort import LocalWork, bucket, cohort_of
from dpjax.federated.execution import context as shared
from dpjax.federated.round import params_of
from dpjax.key_uses import KeyUse, key_for
from dpjax.types import ArrayTree, Params
from dpjax.validate import UserError

if TYPE_CHECKING:
  from dpjax.experiments.kinds.federated.build import FedRun

RESULT = "client_scores"
FINE_TUNED = "client_scores_fine_tuned"
HIDDEN = "not_private/"
TABLE = "clients.csv"
# Largest number of clients that are scored at every evaluation, and of models that are written.
_FEW = 100
# Largest number of clients that are scored, which takes some milliseconds each.
_MOST = 10_000
# Number of clients that are fine-tuned at once.
_AT_ONCE = 64
# Clients with at most so many rows are scored in batches of their size, not of the task's.
_BATCH = 50
_QUANTILES = {"p10": 0.1, "p50": 0.5, "p90": 0.9}


class Score(NamedTuple):
  """The score of a client, of the model that it uses."""

  client: str
  num_test: int
  accuracy: float  # NaN without rows


class Tests(NamedTuple):
  """The rows on which each client is scored."""

  dataset: Any
  rows: list[np.ndarray]
  words: str


def tests_of(federation: Federation, test: Any, *, own_models: bool) -> Tests | None:
  """Returns the rows on which each client is scored; None if there are none, or if clients are too
  many to be scored one by one."""
  if federation.num_clients > _MOST:
    return None
  if federation.held_out is not None:
    return Tests(federation.dataset, [*federation.held_out], "rows that it held out")
  if federation.test_indices is not None:
    return Tests(test, [*federation.test_indices], "its rows of the test set")
  if own_models:
    every = np.arange(len(test))
    return Tests(test, [every] * federation.num_clients, "the whole test set")
  return None


def check(config: FedConfig) -> None:
  """Raises UserError for clients' rows or training that the run would not score; loads no data."""
  seen = not config.protects_users or shows_data(config)
  asked = {"held_out": config.held_out, "fine_tune_epochs": config.fine_tune_epochs}
  for field, value in asked.items():
    if value and not seen:
      raise UserError(
        "must be 0 in a run that shows nothing but what is private, such as a release: the scores "
        "of clients are not private",
        field=field,
        value=value,
      )
  if config.held_out and (is_of_silos(config) or config.audit is not None):
    what = "silos, which have tests of their own" if is_of_silos(config) else "an audit"
    raise UserError(f"must be 0 with {what}", field="held_out", value=config.held_out)
  _check_fine_tuning(config)


def _check_fine_tuning(config: FedConfig) -> None:
  why = ""
  if records.is_of_records(config):
    why = "with privacy='records', whose noise does not cover more steps"
  elif algorithm_of(config).personal is not None:
    why = (
      f"with algorithm={algorithm_of(config).name!r}, whose clients have their own models"
    )
  elif config.audit is not None:
    why = "with an audit"
  if config.fine_tune_epochs and why:
    raise UserError(
      f"must be 0 {why}", field="fine_tune_epochs", value=config.fine_tune_epochs
    )


def own_model(config: FedConfig, state: ArrayTree) -> Callable[[int], Params] | None:
  """Returns a function from a client's place to the model that it uses; None if that is the
  server's."""
  use = algorithm_of(config).personal
  memories = getattr(state, "memories", None)
  if use is None or memories is None:
    return None
  return lambda place: use(params_of(state), shared.row(memories.rows([place]), 0))


class ClientScores:
  """Scores clients of one run. The scores of the last state are kept."""

  def __init__(self, fed: FedRun):
    self._config = config = fed.config
    self._fed = fed
    self._last: tuple[Any, list[Score]] | None = None
    if (
      config.fine_tune_epochs
      and tests_of(fed.federation, fed.test, own_models=False) is None
    ):
      raise UserError(
        f"needs at most {_MOST} clients, and rows on which they are scored; set held_out, such as "
        "--config.held_out=0.2",
        field="fine_tune_epochs",
        value=config.fine_tune_epochs,
      )

  def _is_hidden(self, state: ArrayTree) -> bool:
    """Returns whether scores of clients are not private, in a run that protects users."""
    config = self._config
    if not config.protects_users:
      return False
    return not is_of_silos(config) or own_model(config, state) is not None

  def of(self, state: ArrayTree) -> list[Score]:
    """Returns the score of each client; [] for a task without accuracy, or without rows."""
    if self._last is None or self._last[0] is not state:
      own = own_model(self._config, state)
      server = params_of(state)
      self._last = state, self._scored(own or (lambda place: server), own is not None)
    return self._last[1]

  def _scored(self, model: Callable[[int], Params], own_models: bool) -> list[Score]:
    fed = self._fed
    tests = tests_of(fed.federation, fed.test, own_models=own_models)
    if tests is None:
      return []
    most = max(map(len, tests.rows))
    more = {} if most > _BATCH else {"batch_size": bucket(max(most, 1))}
    evaluate = functools.partial(fed.task.evaluate, fed.apply, **more)
    scores = []
    for place, (name, rows) in enumerate(zip(fed.federation.client_ids, tests.rows)):
      accuracy = math.nan
      if len(rows):
        scored = evaluate(model(place), tests.dataset.subset(rows))
        if "accuracy" not in scored:
          return []
        accuracy = float(scored["accuracy"])
      scores.append(Score(name, len(rows), accuracy))
    return scores if any(score.num_test for score in scores) else []

  # --- what is written

  def row(self, state: ArrayTree) -> dict[str, float]:
    """Returns the scores of a metrics row, if they may be called public and clients are few.

    Silos are scored by their names, too, if each has test rows."""
    silos = is_of_silos(self._config)
    few = silos or self._fed.federation.num_clients <= _FEW
    if self._is_hidden(state) or not few:
      return {}
    scores = self.of(state)
    if not silos:
      return _named("client_accuracy", scores)
    if not all(score.num_test for score in scores):
      return {}
    each = {f"{records.SCORE}/{score.client}": score.accuracy for score in scores}
    return _named(records.SCORE, scores) | each

  def hidden_row(self, state: ArrayTree) -> dict[str, float]:
    """Returns the scores of a metrics row of a run that protects users."""
    config = self._config
    few = self._fed.federation.num_clients <= _FEW
    if not self._is_hidden(state) or not shows_data(config) or not few:
      return {}
    return _named(f"{HIDDEN}client_accuracy", self.of(state))

  def facts(self, state: ArrayTree) -> dict[str, Any]:
    """Returns the parts of result.json on clients' scores."""
    config = self._config
    hidden = self._is_hidden(state)
    if hidden and not shows_data(config):
      return {}
    scores = self.of(state)
    if not scores:
      return {}
    own_models = own_model(config, state) is not None
    tests = tests_of(self._fed.federation, self._fed.test, own_models=own_models)
    assert tests is not None
    model = "its own" if own_models else "the server's"
    prefix = HIDDEN if hidden else ""
    words = {"model": model, "scored_on": tests.words}
    facts = {f"{prefix}{RESULT}": words | summary(scores)}
    tuned = self._fine_tuned(state)
    if tuned:
      words["model"] = "the server's, fine-tuned by the client"
      facts[f"{prefix}{FINE_TUNED}"] = words | summary(tuned)
    return facts

  def _fine_tuned(self, state: ArrayTree) -> list[Score]:
    """Returns the scores after each client has trained the server's model alone; [] if the run does
    not ask for that."""
    config = self._config
    fed = self._fed
    if not config.fine_tune_epochs:
      return []
    # Imported here, since `build` imports this module.
    from dpjax.experiments.kinds.federated import build

    # The keys are those that a round after the last one would have.
    key = key_for(KeyUse.CLIENTS, fed.random.local)
    key = jax.random.fold_in(key, config.num_rounds)
    loss_fn = fed.task.loss(fed.apply)
    tune = fine_tune(loss_fn, build.optimizer(config.client_optimizer), key=key)
    work = LocalWork(
      config.local.batch_size, config.fine_tune_epochs, config.local.max_examples
    )
    tuned: dict[int, Params] = {}

    def model(place: int) -> Params:
      if place not in tuned:
        tuned.clear()
        last = min(place + _AT_ONCE, fed.federation.num_clients)
        cohort = cohort_of(
          fed.federation, np.arange(place, last), work, seed=fed.random.sampler,
          round=config.num_rounds,
        )  # fmt: skip
        several = jax.device_get(tune(params_of(state), cohort))
        for k in range(place, last):
          tuned[k] = jax.tree.map(lambda leaf: leaf[k - place], several)  # noqa: B023
      return tuned[place]

    return self._scored(model, False)

  def write(self, folder: pathlib.Path, state: ArrayTree) -> None:
    """Writes the models that clients keep, and the table and picture of their scores."""
    config = self._config
    own = own_model(config, state)
    count = self._fed.federation.num_clients
    if own is not None and not config.protects_users and count <= _FEW:
      # Names of clients may be no names of files.
      kind = "silo" if is_of_silos(config) else "client"
      for place in range(count):
        workdir.save_params(folder / f"params_of_{kind}_{place}.npz", own(place))
    hidden = self._is_hidden(state)
    scores = [] if hidden and not shows_data(config) else self.of(state)
    known = sorted((s for s in scores if s.num_test), key=lambda score: score.accuracy)
    if len(known) < 2:
      return
    column = f"{HIDDEN}accuracy" if hidden else "accuracy"
    rows = [
      {"rank": rank, "client": s.client, "num_test": s.num_test, column: s.accuracy}
      for rank, s in enumerate(known, 1)
    ]
    report.write_csv(folder / TABLE, rows)
    facts = summary(scores)
    spread = f"worst {facts['worst']:.3f}, sd {facts['std']:.3f}"
    chance = f"by chance alone {facts['std_by_chance']:.3f}"
    recipe = Recipe(
      "lines", ("rank",), (column,),
      references=(("mean", None, facts["mean"]),),
      words={"rank": "clients, the worst first", column: "accuracy"},
      title=f"Accuracy of each of {len(known)} clients",
      note=f"{spread}, {chance}; {_fewest(facts)}",
    )  # fmt: skip
    redraw.write(folder / TABLE, recipe)


def is_of_silos(config: FedConfig) -> bool:
  """Returns whether clients are silos, which are few and have public names."""
  return records.is_of_records(config) or name_of(config, "partition") == records.SILOS


def _fewest(facts: Mapping[str, Any]) -> str:
  rows = facts["fewest_rows"]
  return f"the smallest was scored on {rows} row{'' if rows == 1 else 's'}"


def summary(scores: list[Score]) -> dict[str, Any]:
  """Returns what result.json says of the accuracies of clients.

  `std_by_chance` is the standard deviation that clients with so many test rows would show if each
  row of every client were answered right with the same chance. Where `std` is not far above it, the
  spread says nothing of the clients.

  >>> summary([Score("a", 10, 0.9), Score("b", 10, 0.5), Score("c", 0, math.nan)])["worst"]
  0.5
  """
  known = [score for score in scores if score.num_test]
  values = np.array([score.accuracy for score in known])
  sizes = np.array([score.num_test for score in known])
  pooled = float(np.average(values, weights=sizes))
  return {
    "num_scored": len(known),
    "without_rows": len(scores) - len(known),
    "fewest_rows": int(sizes.min()),
    "mean": float(values.mean()),
    "weighted_mean": pooled,
    "std": float(values.std(ddof=1)) if len(known) > 1 else 0.0,
    "std_by_chance": math.sqrt(pooled * (1 - pooled) * float(np.mean(1 / sizes))),
    "worst": float(values.min()),
    **{name: float(np.quantile(values, share)) for name, share in _QUANTILES.items()},
  }


def _named(name: str, scores: list[Score]) -> dict[str, float]:
  """Returns the scores of a metrics row, whose names begin with `name`; {} without scores."""
  if not scores:
    return {}
  facts = summary(scores)
  shown = ("mean", "worst", "std", *_QUANTILES)
  return {name: facts["weighted_mean"], **{f"{name}_{key}": facts[key] for key in shown}}


def in_words(result: Mapping[str, Any]) -> str:
  """Returns what a finished run's line says of its clients; "" if they have no scores.

  >>> in_words({"client_scores": {"num_scored": 9, "mean": 0.9, "worst": 0.5, "p10": 0.7}})
  '; 9 clients: accuracy mean 0.9000, worst 0.5000, 10 % quantile 0.7000'
  """
  facts = result.get(RESULT) or result.get(f"{HIDDEN}{RESULT}")
  # The line of silos has their scores by name.
  if not facts or records.SILOS in result:
    return ""
  secret = "" if RESULT in result else ", not private"
  tuned = result.get(FINE_TUNED) or result.get(f"{HIDDEN}{FINE_TUNED}")
  after = f", fine-tuned mean {tuned['mean']:.4f}" if tuned else ""
  return (
    f"; {facts['num_scored']} clients: accuracy mean {facts['mean']:.4f}, worst "
    f"{facts['worst']:.4f}, 10 % quantile {facts['p10']:.4f}{after}{secret}"
  )
