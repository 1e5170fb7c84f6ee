"""One run of relevance, from its config.

A run is a sequence of trainings (model 1, model 2). Each training is a phase of the loop with its
own checkpoints, so an interrupted run resumes inside a training. A resumed run reads the result of
each finished training from its last checkpoint. Relevance, noise and noisy records are computed
again from these results, the data and the keys.

A rigorous run is a release (docs/release.md), unless `noise_seed` or `audit.canary_runs` is set.
The keys of every run are kept beside the checkpoints. Keys and checkpoints are deleted when the run
is done.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
import time
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from dpjax import data as data_lib
from dpjax import metrics, relevance
from dpjax.accounting import Ledger
from dpjax.data.target_kinds import needs_classes
from dpjax.experiments.config import common
from dpjax.experiments.config.choices import name_of, to_dict
from dpjax.experiments.config.sections import NetworkConfig
from dpjax.experiments.kinds.central import build as central
from dpjax.experiments.kinds.relevance import audit, relevance_pictures, table
from dpjax.experiments.kinds.relevance.config import RelevanceConfig, check
from dpjax.experiments.kinds.relevance.methods import NoisyGradients, leaves_of
from dpjax.experiments.run import (
  checkpoint,
  left_out,
  report,
  saved,
  sizes,
  writers,
)
from dpjax.experiments.run import guarantee as guarantee_lib
from dpjax.experiments.run import run_keys as run_keys_lib
from dpjax.experiments.run import workdir as owner
from dpjax.experiments.run.experiment import (
  Experiment,
  Outcome,
  Phase,
  Story,
  Trained,
)
from dpjax.experiments.run.guarantee import Guarantee
from dpjax.experiments.run.run_keys import RunKeys
from dpjax.models.libraries.by_path import not_linen
from dpjax.relevance import inputs, pipeline
from dpjax.relevance.privacy import Privacy
from dpjax.relevance.train import Steps
from dpjax.validate import UserError
from dpjax.zoo import networks
from dpjax.zoo.networks import registry

if TYPE_CHECKING:
  from dpjax.experiments.run.dry_run import Planned
  from dpjax.parallel.targets import Machine

_TEMPERED = "tempered_sigmoid"
_MAPS = "maps.npz"
_COUNTS = "confusion.csv"


class Relevance(Experiment[RelevanceConfig]):
  """One run: one method at one epsilon.

  `data` is a dict that runs share, and that each run fills: data sets, model 1 and its relevance.
  The duration of the first such run includes the time to compute them.
  """

  plans = True

  @property
  def release(self) -> bool:
    config = self.config
    # A rigorous run is one, unless its noise can be repeated, or an audit trains on its records
    # again: no epsilon of the run covers what that shows.
    again = config.audit is not None and config.audit.canary_runs
    return config.is_rigorous and config.noise_seed is None and not again

  def check(self) -> None:
    check(self.config)

  def data(self) -> dict[Any, Any]:
    return {}

  def data_key(self) -> Any:
    return [*map(to_dict, (self.config.data, self.config.model))]

  def check_data(self, data: dict[Any, Any]) -> None:
    shape = load_data(self.config, data)[0].x.shape[1:]
    image = len(shape) == 3
    common.read_if(self.config, image, "images", "method.pool", "method.relevance_pool")
    several = image and shape[2] > 1
    words = "images of several channels"
    common.read_if(self.config, several, words, "method.shared_channels")

  def digest(self, data: dict[Any, Any]) -> bytes:
    return data_digest(self.config, data)

  def train(self, data: dict[Any, Any], keys: RunKeys) -> Story:
    config = self.config
    train, test = load_data(config, data)
    seconds: dict[str, float] = {}
    job = make_job(config, train, test, data, keys)
    began = time.monotonic()
    found = yield from _train(config, job, seconds)
    outcome = as_claim(config, found)
    seconds["relevance and noise"] = time.monotonic() - began - sum(seconds.values())
    counted = metrics.confusion(outcome.apply, outcome.params, outcome.test)

    def write(folder: pathlib.Path) -> None:
      if outcome.maps:
        np.savez(folder / _MAPS, **outcome.maps)  # type: ignore[arg-type]
      relevance_pictures.pictures(folder, outcome, config.lrp)
      # As in table 1 of the RADP paper, each class is counted against all other classes.
      names = ("true_positives", "true_negatives", "false_positives", "false_negatives")
      rows = [
        {"class": label} | dict(zip(names, map(int, counts)))
        for label, counts in enumerate(counted.one_against_rest())
      ]
      report.write_csv(folder / _COUNTS, rows)

    times = {name: round(value, 3) for name, value in seconds.items()}
    # A release contains no times, since times depend on the secret sizes of batches.
    more: dict[str, Any] = {"stage_seconds": None if self.release else times}
    more |= left_out.clipped_cells(train, shown=not self.release)
    more["test_squared_error"] = counted.squared_error

    def result(folder: pathlib.Path) -> dict[str, Any]:
      return _result(config, job, outcome, folder) | more

    return Outcome(outcome.params, result, write)

  def end(self, folder: pathlib.Path) -> None:
    table.write_one(folder, name_of(self.config, "method"))
    forget(folder)

  def plan(self, workdir: str, target: Machine | None = None) -> str:
    # Imported here, because most runs are not dry runs.
    from dpjax.experiments.kinds.relevance import rehearsal

    if target is not None:
      raise UserError(
        "is for runs of launch.train and launch.federate", field="target", value=target.text
      )
    return rehearsal.report(self, workdir)

  def rehearse(self, data: dict[Any, Any]) -> Planned:
    from dpjax.experiments.kinds.relevance import rehearsal

    return rehearsal.on_zeros(self, data)

  def alarm(self, result: dict[str, Any]) -> str:
    summary = guarantee_lib.summary(result)
    alarming = table.is_alarming(result)
    return f"audit: a proved epsilon is refuted: {summary}" if alarming else ""


def _train(
  config: RelevanceConfig, job: relevance.Inputs, seconds: dict[str, float]
) -> Generator[Phase, Trained, inputs.Outcome]:
  """Yields a phase for each training of the method, and returns the method's outcome.

  The time of each training is added to `seconds`, by name. If a training resumes, or another run
  has done it, only the time in this process counts.
  """
  told = pipeline.story(name_of(config, "method"), job)
  params = None
  while True:
    try:
      steps = told.send(params)
    except StopIteration as end:
      return end.value
    began = time.monotonic()
    trained = yield phase(config, steps)
    seconds[steps.name] = seconds.get(steps.name, 0.0) + time.monotonic() - began
    params = trained.state[0]


def oscillation(values: Sequence[float]) -> float | None:
  """Returns the mean absolute change between neighbouring values in the last half of a curve.

  Returns None for fewer than two values. The RADP paper calls methods stable, but gives no number.

  >>> oscillation([0.1, 0.9, 0.5, 0.7])
  0.2
  >>> oscillation([0.5]) is None
  True
  """
  # Takes the last half, but at least two values, so that there is a difference.
  late = np.asarray(values[min(len(values) // 2, max(len(values) - 2, 0)) :], np.float64)
  return round(float(np.mean(np.abs(np.diff(late)))), 6) if len(late) > 1 else None


def forget(folder: pathlib.Path) -> None:
  """Deletes a finished run's keys and checkpoints. The identity of its data is kept.

  Keys and checkpoints have no more use, and could reveal the noise. An experiment calls this
  function again, since a run may have been killed right after it wrote its result.
  """
  known = owner.recall(folder)
  if known:
    kept = run_keys_lib.without_keys(known)
    # A folder that is found finished may be one that nobody can write to.
    if kept != known:
      owner.remember(folder, kept)
    checkpoint.remove(folder)


def phase(config: RelevanceConfig, steps: Steps) -> Phase:
  """Returns the phase of one training, without a `guarantee`: the method accounts for privacy."""
  scored = steps.scored
  return Phase(
    num_steps=steps.num_steps,
    init=steps.init,
    step=lambda state, draw: (steps.step(state, draw), None),
    draws=steps.draws,
    released=lambda state: state[0],
    evaluate=None if scored is None else lambda state: scored(state[0]),
    row_at=steps.epoch_at,
    observe=lambda state, info, step: {"epoch": float(steps.epoch_at(step) or 0)},
    name=f"{name_of(config, 'method')}, {steps.name}",
    subfolder=steps.name.replace(" ", "_"),
  )


def as_claim(config: RelevanceConfig, outcome: inputs.Outcome) -> inputs.Outcome:
  """Returns a method's outcome, whose epsilon is a claim if the noise follows from `noise_seed`."""
  privacy = outcome.privacy
  if config.noise_seed is None or privacy.kind == "none":
    return outcome
  failed = (*privacy.failed_assumptions, guarantee_lib.REPEATED)
  privacy = dataclasses.replace(privacy, kind="claimed", failed_assumptions=failed)
  return outcome._replace(privacy=privacy)


def guarantee(privacy: Privacy, num_records: int) -> Guarantee:
  """Returns a method's guarantee in the form that every run uses."""
  return Guarantee(
    kind=privacy.kind,
    delta=privacy.delta,
    relation=privacy.neighboring_relation or "",
    unit=privacy.unit,
    accountant=privacy.details.get("accountant", ""),
    curve=lambda steps: privacy.epsilon or 0.0,
    num_records=num_records,
    failed_assumptions=privacy.failed_assumptions,
  )


def data_digest(config: RelevanceConfig, loaded: dict) -> bytes:
  """Returns the digest of all training data: the private data, and public data of model 1."""
  train = load_data(config, loaded)[0]
  public = load_public(config, loaded)
  # `loaded` keeps both data sets alive, so their ids stay valid.
  key = ("digest", id(train), id(public))
  if key not in loaded:
    digests = map(data_lib.digest, [train] if public is None else [train, public])
    loaded[key] = run_keys_lib.join_digests(*digests)
  return loaded[key]


def load_data(config: RelevanceConfig, loaded: dict) -> tuple[Any, Any]:
  key = tuple(dataclasses.asdict(config.data).values())
  if key not in loaded:
    train, test = config.data.load()
    needs_classes(train, "data.name", config.data.name)
    if train.x.dtype != np.float32 or train.x.min() < 0 or train.x.max() > 1:
      raise UserError("must be images in [0, 1]", field="data.name", value=config.data.name)
    loaded[key] = train, test
  return loaded[key]


def public_size(config: RelevanceConfig, train: Any) -> int:
  """Returns the number of records that plans are made for; see `run.sizes`.

  The data must declare this number only for methods with a plan. Rigorous RADP uses replace_one,
  under which the number is public. Claims of papers need no number, since they prove nothing.
  """
  return sizes.public(
    len(train),
    train.nominal_size,
    relation=getattr(config.method, "neighboring_relation", "add_or_remove_one"),
    promised=isinstance(config.method, NoisyGradients),
    field="data.num_examples",
    other="method.neighboring_relation=replace_one",
  )


def load_public(config: RelevanceConfig, loaded: dict) -> Any:
  """Returns the training data of a public model 1; None for any other."""
  name = getattr(config.method, "public_data", None)
  if name is None:
    return None
  data = dataclasses.replace(config.data, name=name, num_examples=None)
  other = dataclasses.replace(config, data=data)
  return load_data(other, loaded)[0]


def make_job(
  config: RelevanceConfig,
  train: Any,
  test: Any,
  loaded: dict,
  random: RunKeys,
) -> relevance.Inputs:
  """Returns the inputs of a run's method."""
  # A model that cannot be built is refused before any training or cost.
  first = jnp.zeros_like(train.x[:1])
  nets = _nets(config, train.num_classes)
  jax.eval_shape(
    lambda: central.init_params(config.model, nets.first, jax.random.key(0), first)
  )
  return relevance.Inputs(
    epsilon=config.epsilon,
    train=train.declared(public_size(config, train)),
    test=test,
    nets=nets,
    keys=relevance.Keys(random.init, random.noise, random.order, random.sampler),
    training=_training(config),
    lrp=config.lrp,
    public=load_public(config, loaded),
    relevance_records=getattr(config.method, "relevance_records", None),
    memo=loaded.setdefault("memo", {}),
    **config.method.parts(),
  )


def _nets(config: RelevanceConfig, num_classes: int) -> relevance.Nets:
  of_method = leaves_of(config.method)
  activation_1 = of_method.get("activation_1", "relu")
  hidden = of_method.get("hidden", relevance.AdLM.hidden)
  return relevance.Nets(
    first=_build(config.model, num_classes, activation_1),
    second=_build(config.second, num_classes, config.activation),
    body=_build(config.model, hidden, config.activation),
    tempered=_build(config.model, num_classes, _TEMPERED),
  )


def _build(model: NetworkConfig, num_classes: int, activation: str) -> Any:
  options = dict(model.options)
  if "activation" in registry.options(model.name):
    options = {"activation": activation, **options}
  net = networks.build(model.name, num_classes=num_classes, **options)
  # Relevance is propagated only through layers of Flax linen, so other models are refused.
  if not isinstance(net, nn.Module):
    raise not_linen(model.name, type(net))
  return net


def _result(
  config: RelevanceConfig,
  job: relevance.Inputs,
  outcome: inputs.Outcome,
  folder: pathlib.Path,
) -> dict[str, Any]:
  rows = writers.read_metrics(folder)
  last = rows[-1]
  promised = guarantee(outcome.privacy, job.size)
  losses = [row["test_loss"] for row in rows if not math.isnan(row["test_loss"])]
  promised.warn()
  result = {
    "task": "classification",
    "dataset": config.data.name,
    "model": config.model.name,
    "method": name_of(config, "method"),
    "epsilon_target": config.epsilon if config.is_private else None,
    **outcome.privacy.to_json(),
    **promised.facts(Ledger(), promised.curve(outcome.num_steps)),
    "test_accuracy": last["test_accuracy"],
    "test_loss": last["test_loss"],
    "accuracy_oscillation": oscillation([row["test_accuracy"] for row in rows]),
    "best_epoch_test_accuracy": max(row["test_accuracy"] for row in rows),
    "best_epoch_test_loss": min(losses, default=math.nan),
    "num_steps": outcome.num_steps,
    "num_epochs": config.num_epochs,
    "num_examples": job.size,
  }
  # The public data of model 1 influence everything that is computed after model 1.
  if job.public is not None:
    result[saved.PRETRAINED_ON] = [str(config.method.public_data)]
  return result | (audit.facts(config, job, outcome) if config.audit else {})


def _training(config: RelevanceConfig) -> relevance.Training:
  """Returns the settings of training. They are copied by name, so that none is forgotten."""
  usual = relevance.Training(config.num_epochs, config.batch_size)
  names = [field.name for field in dataclasses.fields(usual)]
  of_method = {n: getattr(config.method, n) for n in names if hasattr(config.method, n)}
  return dataclasses.replace(usual, **of_method)
