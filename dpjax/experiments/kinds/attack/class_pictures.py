"""Runs class inversion: trains a model of `launch.train`, and searches for typical inputs of each
class."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax

from dpjax import training, trees
from dpjax.attacks.class_inversion import InversionScore, judge_inversion
from dpjax.attacks.fitting import Fit
from dpjax.experiments.kinds.attack.config import AttackConfig, Trained
from dpjax.experiments.kinds.attack.members import MeasuredAttack
from dpjax.experiments.kinds.central import build as central
from dpjax.experiments.run.run_keys import RunKeys
from dpjax.key_uses import KeyUse, key_for
from dpjax.types import Array, Params
from dpjax.validate import UserError

_OF_RECORDS = "protects one record, not what the records of a class have in common"


def prepare(config: AttackConfig, loaded: tuple[Any, Any], random: RunKeys) -> Trained:
  """Builds the run whose model will be inverted.

  Raises UserError for inputs that are no numbers, a class without training or test records, or
  `total_variation` without images.
  """
  train, test = loaded
  if not np.issubdtype(np.asarray(train.x).dtype, np.floating):
    raise UserError(
      "must have inputs of numbers", field="data.name", value=config.train.data.name
    )
  if config.attack.total_variation and np.ndim(train.x) != 4:
    raise UserError(
      "must be 0, inputs are no images",
      field="attack.total_variation",
      value=config.attack.total_variation,
    )
  for name, part in (("training", train), ("test", test)):
    if len(np.unique(part.y)) < train.num_classes:
      raise UserError(
        f"must hold every class among its {name} records",
        field="data.name",
        value=config.train.data.name,
      )
  return Trained(central.assemble(config.train, loaded, random))


def measured(config: AttackConfig, attacked: Trained, state: Any) -> MeasuredAttack:
  """Returns the inverted inputs, and how many of them a second network, the judge, recognises.

  Chance is 1 / number of classes.
  """
  attack = config.attack
  run = attacked.run
  params = training.eval_params(state)
  x = np.asarray(run.test.x)
  prior = {"mean": x.mean(axis=0), "low": float(x.min()), "high": float(x.max())}
  classes = np.arange(run.train.num_classes)
  key = key_for(KeyUse.CLASS_PICTURES, run.random.init)
  pictured = attack.method(**prior)(
    run.apply, params, x.shape[1:], classes=classes, count=attack.starts, key=key
  )
  judge = _judge(config, run, key)
  score = judge_inversion(pictured, run.apply, judge, run.train, target=params)
  held = run.task.evaluate(run.apply, judge, run.train)["accuracy"]
  result = {
    "test_accuracy": run.task.evaluate(run.apply, params, run.test)["accuracy"],
    "recognised": score.recognised._asdict(),
    "judge_accuracy": held,
    "mse_to_class_mean": score.mse.tolist(),
    "confidence": pictured.confidence.tolist(),
    "verdict": verdict(score, len(classes)),
    "epsilon_note": "" if run.guarantee.kind == "none" else _OF_RECORDS,
  }
  return MeasuredAttack({"x": pictured.x, "y": pictured.y}, result)


def _judge(config: AttackConfig, run: central.Run, key: Array) -> Params:
  """Returns the weights of the judge. It has the target's architecture and other initial weights,
  and is trained on the test records."""
  first = central.start(config.train, run.train, run.random._replace(init=key))[2]

  def loss(params: Params, batch: tuple[Array, Array]) -> Array:
    logits = trees.at_least_float32(run.apply(params, batch[0]))
    labels = optax.softmax_cross_entropy_with_integer_labels(logits, batch[1])
    return jnp.mean(labels)

  rows = np.asarray(run.test.x), np.asarray(run.test.y)
  return Fit(steps=config.attack.judge_steps)(loss, first, rows, seed=run.random.order)


def verdict(score: InversionScore, num_classes: int) -> str:
  """Returns the verdict: a defence fails if inputs are recognised more often than by chance.

  Chance is 1 / num_classes. The lower end of the rate's interval must exceed chance.

  >>> from dpjax.attacks.roc import counted
  >>> ten = lambda n: InversionScore(counted(n, 10), None, [])
  >>> verdict(ten(8), 10), verdict(ten(2), 10)
  ('FAILS: classes are recognised', 'not shown to fail')
  """
  apart = score.recognised.interval[0] > 1 / num_classes
  return "FAILS: classes are recognised" if apart else "not shown to fail"
