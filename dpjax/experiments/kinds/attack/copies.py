"""Runs model extraction: trains a model of `launch.train`, and copies of it on its answers."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from dpjax import attacks, training
from dpjax.attacks import extraction, roc
from dpjax.attacks.fitting import Fit
from dpjax.attacks.roc import Counted
from dpjax.experiments.config.naming import within
from dpjax.experiments.kinds.attack.config import AttackConfig, Trained
from dpjax.experiments.kinds.attack.members import MeasuredAttack
from dpjax.experiments.kinds.central import build as central
from dpjax.experiments.run.run_keys import RunKeys
from dpjax.validate import UserError

_OF_RECORDS = "protects the records, not the model: a private model is copied as any other"


@dataclasses.dataclass(frozen=True)
class Copied(Trained):
  """The run of the model to copy, and the inputs that the attacker asks about."""

  queries: np.ndarray  # [largest number of queries, ...]
  held_out: np.ndarray  # [m, ...], never asked; copy and model are compared on them


def prepare(config: AttackConfig, loaded: tuple[Any, Any], random: RunKeys) -> Copied:
  """Returns the run, and the test inputs, split into queries and held-out inputs.

  Copy and model are compared on the held-out inputs. Raises UserError if there are none.
  """
  run = central.assemble(config.train, loaded, random)
  asked = max(config.attack.num_queries)
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
      value=config.attack.num_queries,
    )
  return Copied(run, queries, others)


def measured(config: AttackConfig, attacked: Copied, state: Any) -> MeasuredAttack:
  """Returns the fidelity of a copy for each number of queries, and of a constant guess.

  The constant guess is the model's most common answer to the queries.
  """
  run = attacked.run
  attack = config.attack
  params = training.eval_params(state)
  door = extraction.ask(
    run.apply, params, labels_only=attack.labels_only, decimals=attack.decimals
  )
  init = lambda key: central.start(config.train, run.train, run.random._replace(init=key))[
    2
  ]
  thief = attacks.Extraction(
    run.apply, init, Fit(steps=attack.steps, learning_rate=attack.learning_rate)
  )
  with within("attack"):
    rows = extraction.extraction_curve(
      thief,
      door,
      attacked.queries,
      attacked.held_out,
      num_queries=attack.num_queries,
      seed=run.random.order,
    )
  # The baseline is a copy that always gives the most common answer to the queries.
  truth = door(attacked.held_out)
  label = np.bincount(door(attacked.queries).argmax(axis=1)).argmax()
  guess = roc.counted(int(np.sum(truth.argmax(axis=1) == label)), len(truth))
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
  rates = np.array([[row.num_queries, *row.alike[:2]] for row in rows])
  return MeasuredAttack({"rates": rates}, result)


def verdict(row: extraction.Agreement, guess: Counted) -> str:
  """Returns the verdict: a defence fails if the copy agrees more often than a constant guess.

  The interval of the copy's rate must lie above the interval of the guess.

  >>> answers = np.eye(2)[[0] * 50 + [1] * 50]
  >>> row = extraction.agreement(answers, answers, num_queries=5)
  >>> verdict(row, roc.counted(50, 100)), verdict(row, roc.counted(99, 100))
  ('FAILS: the model is copied', 'not shown to fail')
  """
  apart = row.alike.interval[0] > guess.interval[1]
  return "FAILS: the model is copied" if apart else "not shown to fail"
