"""Model extraction: trains a model of `launch.train`, and copies of it on its answers."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, ClassVar

import numpy as np

from dpjax import attacks, training
from dpjax.accounting.text import round_out
from dpjax.attacks import extraction, roc
from dpjax.attacks.fitting import Fit
from dpjax.attacks.roc import Counted
from dpjax.experiments.config import rules
from dpjax.experiments.config.naming import within
from dpjax.experiments.kinds.attack.config import AttackConfig
from dpjax.experiments.kinds.attack.settings import (
  AttackSettings,
  MeasuredAttack,
  Row,
  Trained,
  check_rising,
  counted_row,
  rate,
)
from dpjax.experiments.kinds.central import build as central
from dpjax.experiments.run.run_keys import RunKeys
from dpjax.validate import UserError

_OF_RECORDS = "protects the records, not the model: a private model is copied as any other"


@dataclasses.dataclass(frozen=True)
class Copied(Trained):
  """The run of the model to copy, and the inputs that the attacker asks about."""

  queries: np.ndarray  # [largest number of queries, ...]
  held_out: np.ndarray  # [m, ...], never asked; copy and model are compared on them


@dataclasses.dataclass(frozen=True)
class CopyByAnswers(AttackSettings):
  """`attacks.Extraction`: a copy of the model, trained on the model's answers to test inputs."""

  num_queries: Annotated[
    tuple[int, ...], "how many are asked, one copy for each; the verdict is on the most"
  ] = (10, 100)
  labels_only: Annotated[bool, "the owner keeps back all but the label"] = False
  decimals: Annotated[
    int | None, rules.at_least(0), "digits of an answer; none: all of them"
  ] = None
  steps: Annotated[int, rules.between(1, rules.MOST_STEPS), "of the copy's training"] = 2000
  learning_rate: Annotated[float, rules.POSITIVE, "of the copy's training"] = 1e-3
  section: ClassVar[str] = "train"
  task: ClassVar[str] = "extraction"

  def __post_init__(self):
    check_rising(1, num_queries=self.num_queries)
    rules.check_settings(self)
    if self.decimals is not None and self.labels_only:
      raise UserError(
        "labels have none; must be None", field="decimals", value=self.decimals
      )

  def prepare(
    self, config: AttackConfig, loaded: tuple[Any, Any], random: RunKeys
  ) -> Copied:
    """Returns the run, and the test inputs, split into queries and held-out inputs.

    Copy and model are compared on the held-out inputs. Raises UserError if there are none.
    """
    run = central.assemble(config.train, loaded, random)
    asked = max(self.num_queries)
    x = np.asarray(run.test.x)
    order = np.random.default_rng(random.order).permutation(len(x))
    queries = x[order[:asked]]
    others = x[order[asked:]]
    known = {row.tobytes() for row in queries}
    others = others[[row.tobytes() not in known for row in others]]
    if not len(others):
      raise UserError(
        f"must leave some of the {len(x)} test inputs, on which the copy is compared",
        field="attack.num_queries",
        value=self.num_queries,
      )
    return Copied(run, queries, others)

  def measure(self, config: AttackConfig, attacked: Copied, state: Any) -> MeasuredAttack:
    """Returns the fidelity of a copy for each number of queries, and of a constant guess.

    The constant guess is the model's most common answer to the queries.
    """
    run = attacked.run
    params = training.eval_params(state)
    door = extraction.ask(
      run.apply, params, labels_only=self.labels_only, decimals=self.decimals
    )
    init = lambda key: central.start(
      config.train, run.train, run.random._replace(init=key)
    )[2]
    thief = attacks.Extraction(
      run.apply, init, Fit(steps=self.steps, learning_rate=self.learning_rate)
    )
    with within("attack"):
      rows = extraction.extraction_curve(
        thief,
        door,
        attacked.queries,
        attacked.held_out,
        num_queries=self.num_queries,
        seed=run.random.order,
      )
    # The baseline is a copy that always gives the most common answer to the queries.
    truth = door(attacked.held_out)
    label = np.bincount(door(attacked.queries).argmax(axis=1)).argmax()
    guess = roc.with_interval(int(np.sum(truth.argmax(axis=1) == label)), len(truth))
    result = {
      "test_accuracy": run.task.evaluate(run.apply, params, run.test)["accuracy"],
      "copies": [
        {
          "num_queries": row.num_queries,
          **row.alike._asdict(),
          "verdict": verdict(row, guess),
        }
        for row in rows
      ],
      "commonest": {"count": guess.count, "total": guess.total},
      "epsilon_note": "" if attacked.guarantee.kind == "none" else _OF_RECORDS,
    }
    result["rows"] = [_table_row(copy, result["commonest"]) for copy in result["copies"]]
    rates = np.array([[row.num_queries, *row.alike[:2]] for row in rows])
    return MeasuredAttack({"rates": rates}, result)


def verdict(row: extraction.Agreement, guess: Counted) -> str:
  """Returns the verdict: a defence fails if the copy agrees more often than a constant guess.

  The interval of the copy's rate must lie above the interval of the guess.

  >>> answers = np.eye(2)[[0] * 50 + [1] * 50]
  >>> row = extraction.agreement(answers, answers, num_queries=5)
  >>> verdict(row, roc.with_interval(50, 100)), verdict(row, roc.with_interval(99, 100))
  ('FAILS: the model is copied', 'not shown to fail')
  """
  apart = row.alike.interval[0] > guess.interval[1]
  return "FAILS: the model is copied" if apart else "not shown to fail"


def _table_row(copy: Row, guess: Row) -> Row:
  """Returns the row of one copy; success is fidelity."""
  low, high = copy["interval"]
  ends = round_out((low, high))
  text = f"fidelity {rate(copy)} ({ends}); {rate(guess)} the commonest answer"
  return counted_row(
    copy, f"{copy['num_queries']} queries", "named alike by copy and model, of inputs", text,
    verdict=copy["verdict"],
  )  # fmt: skip
