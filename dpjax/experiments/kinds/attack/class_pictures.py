"""Class inversion: trains a model of `launch.train`, and searches for typical inputs of each
class."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, ClassVar

import jax.numpy as jnp
import numpy as np
import optax

from dpjax import attacks, training, trees
from dpjax.accounting.text import round_out
from dpjax.attacks.class_inversion import InversionScore, judge_inversion
from dpjax.attacks.fitting import Fit
from dpjax.experiments.config import rules
from dpjax.experiments.kinds.attack.config import AttackConfig
from dpjax.experiments.kinds.attack.settings import (
  AttackSettings,
  MeasuredAttack,
  Row,
  Trained,
  counted_row,
)
from dpjax.experiments.kinds.central import build as central
from dpjax.experiments.run.run_keys import RunKeys
from dpjax.key_uses import KeyUse, key_for
from dpjax.types import Array, Params
from dpjax.validate import UserError

_OF_RECORDS = "protects one record, not what the records of a class have in common"


@dataclasses.dataclass(frozen=True)
class ClassSearch(AttackSettings):
  """`attacks.ClassInversion` of every class, judged by a network of the model's architecture that
  was trained on the test records. The search stays in the range of the test inputs."""

  starts: Annotated[int, rules.between(1, rules.MOST_RUNS), "random ones of each class"] = 1
  steps: Annotated[int, rules.between(1, rules.MOST_STEPS), "of the search"] = 500
  learning_rate: Annotated[float, "of the search"] = 0.05
  temperature: Annotated[float, "by which logits are divided"] = 1.0
  l2: Annotated[float, "of the prior, near the mean of the test inputs"] = 0.01
  total_variation: Annotated[float, "of the prior, for smooth images"] = 0.0
  judge_steps: Annotated[
    int, rules.between(1, rules.MOST_STEPS), "of the judge's training"
  ] = 2000
  section: ClassVar[str] = "train"
  task: ClassVar[str] = "class_inversion"

  def __post_init__(self):
    rules.check_settings(self)
    self.method()

  def method(self, **prior: Any) -> attacks.ClassInversion:
    """Returns the search. `prior` holds mean, low and high of the inputs."""
    return attacks.ClassInversion(
      steps=self.steps,
      learning_rate=self.learning_rate,
      temperature=self.temperature,
      l2=self.l2,
      total_variation=self.total_variation,
      **prior,
    )

  def prepare(
    self, config: AttackConfig, loaded: tuple[Any, Any], random: RunKeys
  ) -> Trained:
    """Builds the run whose model will be inverted.

    Raises UserError for inputs that are no numbers, a class without training or test records, or
    `total_variation` without images.
    """
    train, test = loaded
    if not np.issubdtype(np.asarray(train.x).dtype, np.floating):
      raise UserError(
        "must have inputs of numbers", field="data.name", value=config.train.data.name
      )
    if self.total_variation and np.ndim(train.x) != 4:
      raise UserError(
        "must be 0, inputs are no images",
        field="attack.total_variation",
        value=self.total_variation,
      )
    for name, part in (("training", train), ("test", test)):
      if len(np.unique(part.y)) < train.num_classes:
        raise UserError(
          f"must hold every class among its {name} records",
          field="data.name",
          value=config.train.data.name,
        )
    return Trained(central.assemble(config.train, loaded, random))

  def measure(self, config: AttackConfig, attacked: Trained, state: Any) -> MeasuredAttack:
    """Returns the inverted inputs, and how many of them a second network, the judge, recognises.

    Chance is 1 / number of classes.
    """
    run = attacked.run
    params = training.eval_params(state)
    x = np.asarray(run.test.x)
    prior = {"mean": x.mean(axis=0), "low": float(x.min()), "high": float(x.max())}
    classes = np.arange(run.train.num_classes)
    key = key_for(KeyUse.CLASS_PICTURES, run.random.init)
    pictured = self.method(**prior)(
      run.apply, params, x.shape[1:], classes=classes, count=self.starts, key=key
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
    result["rows"] = [_table_row(result)]
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

  >>> from dpjax.attacks.roc import with_interval
  >>> ten = lambda n: InversionScore(with_interval(n, 10), None, [])
  >>> verdict(ten(8), 10), verdict(ten(2), 10)
  ('FAILS: classes are recognised', 'not shown to fail')
  """
  apart = score.recognised.interval[0] > 1 / num_classes
  return "FAILS: classes are recognised" if apart else "not shown to fail"


def _table_row(result: Row) -> Row:
  counts = result["recognised"]
  low, high = counts["interval"]
  text = (
    f"{counts['count']} of {counts['total']} ({round_out((low, high), 2)}) called by their class"
    f"; the judge is right on {result['judge_accuracy']:.3f}"
  )
  share = "recognised by the judge, of inputs"
  return counted_row(counts, "class inversion", share, text, verdict=result["verdict"])
