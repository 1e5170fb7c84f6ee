"""The audit of final models as a command: `launch.audit --final_model=DATA`.

Full-batch DP-SGD with the claimed epsilon trains linear classifiers on `num_records` records. It
trains `num_models` models with a target among the records, and as many without the target
(`dpjax.auditing.final_model`). Worst-case initial parameters are fitted on the auditor's own
records: other records of the data set, and blanks of one class. So after the fit, every other label
of a blank is unlikely.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpjax import auditing, data, losses, validate
from dpjax.accounting import upper
from dpjax.accounting.text import lower, percent
from dpjax.auditing import bootstrap
from dpjax.auditing.final_model import blank_target, fitted_params
from dpjax.auditing.lower_bounds import METHODS
from dpjax.auditing.scores import Scores
from dpjax.auditing.verdict import check_method
from dpjax.experiments.run import provenance, writers
from dpjax.plan import Plan
from dpjax.sampling import PoissonSampler
from dpjax.types import LossFn, Params
from dpjax.validate import UserError
from dpjax.zoo import networks

RESULT = "final_model.json"
INITIAL = ("worst_case", "ordinary")
# Largest number of the auditor's own records. A tenth as many blanks are added to them.
_MOST_MEMBERS = 2000
# Smallest number of models for which bootstrap intervals are computed.
_FOR_BOOTSTRAP = 50
# Number of padding rows beyond the records. `Plan.check_capacity` needs room for one record more.
_SPARE = 16
_FIT: dict[str, Any] = {"num_steps": 300, "learning_rate": 0.02}  # of Adam, full batch
_SHOWN = ("gdp", "clopper_pearson")


@dataclasses.dataclass(frozen=True)
class FinalModels:
  """Settings of an audit of final models.

  Args:
    data: name of a data set of images with classes.
    epsilon, delta: the claimed guarantee.
    num_models: number of trainings with the target, and number of trainings without it.
    initial: initial parameters, "worst_case" (fitted) or "ordinary" (by the model's initialiser).
    num_records: number of records, with the target.
    num_steps: number of steps of full-batch gradient descent.
    seed: seed of initial parameters and of the noise.
  """

  data: str = "mnist"
  epsilon: float = 10.0
  num_models: int = 1000
  initial: str = "worst_case"
  delta: float = 1e-5
  num_records: int = 1000
  num_steps: int = 20
  learning_rate: float = 4.0
  confidence: float = 0.95
  seed: int = 0

  def __post_init__(self) -> None:
    validate.positive(epsilon=self.epsilon, learning_rate=self.learning_rate)
    validate.open_unit(delta=self.delta, confidence=self.confidence)
    validate.integer_at_least(2, num_models=self.num_models, num_records=self.num_records)
    validate.integer_at_least(1, num_steps=self.num_steps)
    validate.integer_at_least(0, seed=self.seed)
    validate.one_of(INITIAL, initial=self.initial)


def run(settings: FinalModels, out: str | os.PathLike) -> dict[str, Any]:
  """Trains the models, writes `out`/final_model.json and returns its content.

  Raises UserError for a data set without images and classes, or with too few records. Raises it
  also for a folder that cannot be written, or holds the result of other settings or versions.
  """
  started = time.perf_counter()
  folder = pathlib.Path(out)
  _check_folder(settings, folder)
  records, members, test = _parts(settings)
  model: Any = networks.build("linear", num_classes=records.num_classes)
  loss_fn = losses.softmax_cross_entropy(model.apply)
  params = model.init(jax.random.key(settings.seed), jnp.zeros_like(records.x[:1]))
  if settings.initial == "worst_case":
    params = fitted_params(loss_fn, params, members, **_FIT)
  target = blank_target(model.apply, params, records)
  plan = _plan(settings)
  scores = _scores(settings, plan, loss_fn, params, records, target)
  level = {"delta": settings.delta, "confidence": settings.confidence}
  bounds = {name: METHODS[name](scores, **level) for name in _SHOWN}
  perfect = Scores(np.ones(settings.num_models), np.zeros(settings.num_models))
  guesses = np.argmax(np.asarray(model.apply(params, jnp.asarray(test.x))), axis=-1)
  result = {
    **dataclasses.asdict(settings),
    "epsilon_claimed": plan.epsilon(),
    "noise_multiplier": plan.noise_multiplier,
    "initial_test_accuracy": float(np.mean(guesses == test.y)),
    "target_label": int(target.y[0]),
    "bounds": bounds,
    "estimates": _estimates(scores, settings),
    "refuted": bounds["gdp"] > plan.epsilon(),
    "can_refute": METHODS["gdp"](perfect, **level) > plan.epsilon(),
    "minutes": (time.perf_counter() - started) / 60,
    "versions": provenance.versions(),
  }
  folder.mkdir(parents=True, exist_ok=True)
  writers.write_json(folder / RESULT, result)
  return result


def _check_folder(settings: FinalModels, folder: pathlib.Path) -> None:
  validate.folder(out=folder)
  if not (folder / RESULT).exists():
    return
  asked = dataclasses.asdict(settings)
  known = writers.read_json(folder / RESULT)
  known = known if isinstance(known, dict) else {}
  if not provenance.same_libraries(known.get("versions")):
    asked["versions"] = provenance.libraries()
  for name, value in asked.items():
    if known.get(name) != value:
      raise UserError(
        f"holds a result of {name}={known.get(name)!r}, not {value!r}; choose "
        "another directory, nothing was changed",
        field="out",
        value=str(folder),
      )


def _plan(settings: FinalModels) -> Plan:
  """Returns a plan with all records in every step, so that the run is Gaussian-DP and the bound
  `gdp` holds."""
  plan = Plan.calibrated(
    epsilon=settings.epsilon,
    delta=settings.delta,
    sampler=PoissonSampler(sampling_prob=1.0, capacity=settings.num_records + _SPARE),
    num_steps=settings.num_steps,
    l2_clip_norm=1.0,
    normalize_by=settings.num_records,
  )
  check_method("gdp", plan.event())
  return plan


def _scores(
  settings: FinalModels,
  plan: Plan,
  loss_fn: LossFn,
  params: Params,
  records: Any,
  target: Any,
) -> Scores:
  done = 0
  with writers.Progress(2 * settings.num_models, 0, "final models") as bar:

    def tell(count: int, _: int) -> None:
      nonlocal done
      bar.update(count - done)
      done = count

    return auditing.final_model_scores(
      loss_fn,
      plan,
      optax.sgd(settings.learning_rate),
      params=params,
      records=records,
      target=target,
      num_models=settings.num_models,
      seed=settings.seed,
      progress=tell,
    )


def line(result: dict[str, Any]) -> str:
  """Returns one line about a result: the verdict, the settings, the lower bounds and the claim."""
  said = "REFUTED" if result["refuted"] else "not refuted"
  said += "" if result["can_refute"] else " (so few models CANNOT refute it)"
  bounds = ", ".join(f"{lower(value)} ({name})" for name, value in result["bounds"].items())
  return (
    f"{said}: {result['data']}, final model only, {result['initial']} initial parameters, "
    f"{result['num_models']} models with the target and as many without: epsilon >= {bounds}, "
    f"each with {percent(result['confidence'])} confidence, at delta={upper(result['delta'])}; "
    f"claimed {upper(result['epsilon_claimed'])}; {result['minutes']:.1f} minutes"
  )


def _estimates(scores: Scores, settings: FinalModels) -> dict[str, Any]:
  """Returns estimates with bootstrap intervals, which hold since the models are independent; {} for
  few models."""
  if settings.num_models < _FOR_BOOTSTRAP:
    return {}
  statistics = {
    "auc": bootstrap.auc,
    "epsilon": functools.partial(bootstrap.estimated_epsilon, delta=settings.delta),
  }
  interval = functools.partial(
    bootstrap.bootstrap_interval, seed=settings.seed, confidence=settings.confidence
  )
  return {
    name: interval(statistic, scores).to_json() for name, statistic in statistics.items()
  }


def _parts(settings: FinalModels) -> tuple[data.Dataset, data.Dataset, data.Dataset]:
  """Returns (records without the target, the auditor's records with blanks, test)."""
  try:
    train, test = data.load(settings.data)
  except UserError as error:
    raise error.of(field="data", value=settings.data) from error
  if train.num_classes < 2 or train.x.dtype == np.int32:
    raise UserError(
      "must hold images of 2 or more classes", field="data", value=settings.data
    )
  # The target counts as one of the records. It is a blank, not a record of the data.
  kept = settings.num_records - 1
  if kept + 10 > len(train):
    raise UserError(
      f"must be at most {len(train) - 9}, for the auditor needs some of the "
      f"{len(train)} records of {settings.data!r}",
      field="num_records",
      value=settings.num_records,
    )
  members = train.subset(slice(kept, kept + _MOST_MEMBERS))
  blanks = np.zeros_like(members.x[: max(1, len(members) // 10)])
  members = dataclasses.replace(
    members,
    x=np.concatenate([members.x, blanks]),
    y=np.concatenate([members.y, np.zeros(len(blanks), members.y.dtype)]),
  )
  records = train.subset(slice(0, kept)).declared(settings.num_records)
  return records, members, test
