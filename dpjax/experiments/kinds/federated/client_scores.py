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
from dpjax.experiments.config import common
from dpjax.experiments.config.choices import name_of
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


def tests_of(federation: Federation, test: Any, *, own_models: bool) -> Tests:
  """Returns the rows on which each client is scored; no rows if there are none, or if clients are
  too many to be scored one by one."""
  if federation.num_clients > _MOST:
    return Tests(test, [], "")
  if federation.held_out is not None:
    return Tests(federation.dataset, [*federation.held_out], "rows that it held out")
  if federation.test_indices is not None:
    return Tests(test, [*federation.test_indices], "its rows of the test set")
  every = [np.arange(len(test))] * federation.num_clients if own_models else []
  return Tests(test, every, "the whole test set")


def check(config: FedConfig) -> None:
  """Raises UserError for clients' rows or training that the run would not score; loads no data."""
  seen = not config.protects_users or shows_data(config)
  why = " in a run that shows nothing but what is private, such as a release"
  for field in () if seen else ("held_out", "fine_tune_epochs"):
    common.only(config, field, [0], f"{why}: the scores of clients are not private")
  if is_of_silos(config) or config.audit is not None:
    what = "silos, which have tests of their own" if is_of_silos(config) else "an audit"
    common.only(config, "held_out", [0], f" with {what}")
  why = ""
  if config.protects_records:
    why = "with privacy='records', whose noise does not cover more steps"
  elif algorithm_of(config).personal is not None:
    why = (
      f"with algorithm={algorithm_of(config).name!r}, whose clients have their own models"
    )
  elif config.audit is not None:
    why = "with an audit"
  if why:
    common.only(config, "fine_tune_epochs", [0], f" {why}")


class ClientScores:
  """Scores clients of one run. The scores of the last state are kept."""

  def __init__(self, fed: FedRun):
    config = fed.config
    of_silos = is_of_silos(config)
    self._fed = fed
    # Function from (server's parameters, what a client keeps) to the model that it uses; None: it
    # uses the server's.
    self._personal = algorithm_of(config).personal
    own_models = self._personal is not None
    self._tests = tests_of(fed.federation, fed.test, own_models=own_models)
    # In a run that protects users, scores of clients are not private.
    self._hidden = config.protects_users and (own_models or not of_silos)
    self._shown = not self._hidden or shows_data(config)
    self._few = of_silos or fed.federation.num_clients <= _FEW
    self._last: tuple[Any, list[Score]] | None = None
    if config.fine_tune_epochs and not self._tests.rows:
      raise UserError(
        f"needs at most {_MOST} clients, and rows on which they are scored; set held_out, such as "
        "--config.held_out=0.2",
        field="fine_tune_epochs",
        value=config.fine_tune_epochs,
      )

  def model_of(self, state: ArrayTree, place: int) -> Params:
    """Returns the model that a client uses: its own, or the server's."""
    server = params_of(state)
    if self._personal is None:
      return server
    return self._personal(server, shared.row(state.memories.rows([place]), 0))

  def of(self, state: ArrayTree) -> list[Score]:
    """Returns the score of each client; [] for a task without accuracy, or without rows."""
    if self._last is None or self._last[0] is not state:
      self._last = state, self._score(functools.partial(self.model_of, state))
    return self._last[1]

  def _score(self, model: Callable[[int], Params]) -> list[Score]:
    fed = self._fed
    tests = self._tests
    most = max(map(len, tests.rows), default=0)
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
    if self._hidden or not self._few:
      return {}
    scores = self.of(state)
    if not is_of_silos(self._fed.config):
      return _row_of("client_accuracy", scores)
    if not all(score.num_test for score in scores):
      return {}
    each = {f"{records.SCORE}/{score.client}": score.accuracy for score in scores}
    return _row_of(records.SCORE, scores) | each

  def hidden_row(self, state: ArrayTree) -> dict[str, float]:
    """Returns the scores of a metrics row of a run that protects users."""
    if not (self._hidden and self._shown and self._few):
      return {}
    return _row_of(f"{HIDDEN}client_accuracy", self.of(state))

  def facts(self, state: ArrayTree) -> dict[str, Any]:
    """Returns the parts of result.json on clients' scores."""
    scores = self.of(state) if self._shown else []
    if not scores:
      return {}
    prefix = HIDDEN if self._hidden else ""
    model = "the server's" if self._personal is None else "its own"
    words = {"model": model, "scored_on": self._tests.words}
    facts = {f"{prefix}{RESULT}": words | summary(scores)}
    if self._fed.config.fine_tune_epochs:
      words["model"] = "the server's, fine-tuned by the client"
      facts[f"{prefix}{FINE_TUNED}"] = words | summary(self._fine_tune(state))
    return facts

  def _fine_tune(self, state: ArrayTree) -> list[Score]:
    """Returns the scores after each client has trained the server's model alone."""
    fed = self._fed
    config = fed.config
    # Imported here, since `build` imports this module.
    from dpjax.experiments.kinds.federated import build

    # The keys are those that a round after the last one would have.
    key = key_for(KeyUse.CLIENTS, fed.random.local)
    key = jax.random.fold_in(key, config.num_rounds)
    loss_fn = fed.task.loss(fed.apply)
    tune = fine_tune(loss_fn, build.client_optimizer(config), key=key)
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

    return self._score(model)

  def write(self, folder: pathlib.Path, state: ArrayTree) -> None:
    """Writes the models that clients keep, and the table and picture of their scores."""
    config = self._fed.config
    count = self._fed.federation.num_clients
    keep = self._personal is not None and not config.protects_users
    if keep and count <= _FEW:
      # Names of clients may be no names of files.
      kind = "silo" if is_of_silos(config) else "client"
      for place in range(count):
        path = folder / f"params_of_{kind}_{place}.npz"
        workdir.save_params(path, self.model_of(state, place))
    scores = self.of(state) if self._shown else []
    known = sorted((s for s in scores if s.num_test), key=lambda score: score.accuracy)
    if len(known) < 2:
      return
    column = f"{HIDDEN}accuracy" if self._hidden else "accuracy"
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
  return config.protects_records or name_of(config, "partition") == records.SILOS


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


def _row_of(name: str, scores: list[Score]) -> dict[str, float]:
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
