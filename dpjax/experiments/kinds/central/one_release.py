"""Runs privacy='least_squares': fits a linear model to noisy sums of the data.

There are no steps and no batches. Every example is in the one release of `LeastSquares`, which is
accounted as one Gaussian sum over all examples. Private statistics of the inputs
(`privacy.normalization`) are released before, within the same epsilon.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from dpjax import data, gradients, mechanisms, metrics, validate
from dpjax.accounting.proved import RELATIONS
from dpjax.accounting.text import paragraph
from dpjax.data.target_kinds import needs_classes
from dpjax.experiments.config import common
from dpjax.experiments.config.common import attack_of
from dpjax.experiments.config.naming import within
from dpjax.experiments.kinds import privacy_section
from dpjax.experiments.kinds.central import build, features, normalization, privacy
from dpjax.experiments.kinds.central.config import LeastSquares, TrainConfig
from dpjax.experiments.kinds.central.facts import class_scores, of_plan, shows_data
from dpjax.experiments.run import guarantee, left_out, provenance, saved
from dpjax.experiments.run.experiment import Phase
from dpjax.experiments.run.guarantee import Guarantee
from dpjax.experiments.run.run_keys import RunKeys
from dpjax.mechanisms import finite, least_squares
from dpjax.plan import Plan
from dpjax.sampling.samplers import UnamplifiedSampler
from dpjax.types import Params
from dpjax.validate import UserError

LEAST_SQUARES = "least_squares"
_REPLACE = "replace_one"


@dataclasses.dataclass(frozen=True)
class WholeData(UnamplifiedSampler):
  """Sampler that draws every example in every step, without amplification.

  Args:
    capacity: public bound on the number of examples; the release itself needs no bound.

  >>> WholeData(capacity=4).draw(3, seed=0, step=0).tolist()
  [0, 1, 2]
  """

  relations: ClassVar[tuple[str, ...]] = RELATIONS

  capacity: int

  def __post_init__(self) -> None:
    validate.integer_at_least(1, capacity=self.capacity)

  @property
  def padded_batch_size(self) -> int:
    return self.capacity

  def draw(self, num_examples: int, *, seed: int, step: int) -> np.ndarray:
    del seed, step
    if num_examples > self.capacity:
      # The message does not show the number of examples, which is private.
      raise UserError(
        "is less than the number of examples", field="capacity", value=self.capacity
      )
    return np.arange(num_examples)


def check(config: TrainConfig) -> None:
  """Raises UserError for settings that `least_squares` does not support; loads no data."""
  reason = f"with privacy={LEAST_SQUARES!r}"
  if settings(config).noise_multiplier == 0:
    raise UserError(f"must be > 0 {reason}", field="privacy.noise_multiplier", value=0)
  chosen = settings(config)
  # The mechanism checks its fields when it is made. The noise multiplier is not known yet, so any
  # valid number serves.
  with within("privacy"):
    mechanisms.LeastSquares(
      noise_multiplier=1.0,
      feature_norm=chosen.feature_norm,
      moment_weight=chosen.moment_weight,
      unit_rows=chosen.unit_rows,
    )


def settings(config: TrainConfig) -> LeastSquares:
  """Returns the method's own fields."""
  assert isinstance(config.privacy, LeastSquares)
  return config.privacy


def bound(config: TrainConfig) -> float:
  """Returns the plan's clip norm: the joint sensitivity of both sums, for rows of clip norm 1.

  Under replace_one it is half of the joint sensitivity, since the accountant doubles a clip norm.
  """
  chosen = settings(config)
  relation = chosen.neighboring_relation
  joint = least_squares.joint_sensitivity(chosen.moment_weight, relation)
  return joint / 2 if relation == _REPLACE else joint


def make_plan(config: TrainConfig, num_examples: int) -> Plan:
  """Returns the plan of the one release, statistics of the inputs included.

  Args:
    num_examples: public number of examples.
  """
  sampler = WholeData(capacity=num_examples + 1)
  return privacy_section.plan(
    config.privacy,
    sampler=sampler,
    num_steps=1,
    l2_clip_norm=gradients.Clip(bound(config)),
    normalize_by=1.0,
    statistics=normalization.mechanism(config, num_examples, sampler),
  )


def mechanism(config: TrainConfig, plan: Plan, num_classes: int) -> mechanisms.LeastSquares:
  """Returns the mechanism with the noise of the plan."""
  chosen = settings(config)
  relation = plan.neighboring_relation
  # A plan's noise multiplier is relative to its clip norm (`bound`). A mechanism's noise multiplier
  # is relative to the sensitivity, which under replace_one is twice this clip norm.
  hops = 2 if relation == _REPLACE else 1
  return mechanisms.LeastSquares(
    noise_multiplier=plan.noise_multiplier / hops,
    feature_norm=chosen.feature_norm,
    target_norm=mechanisms.centred_norm(num_classes),
    moment_weight=chosen.moment_weight,
    unit_rows=chosen.unit_rows,
    neighboring_relation=relation,
  )


def phase(
  config: TrainConfig, loaded: tuple[data.Dataset, data.Dataset], random: RunKeys
) -> Phase:
  """Returns the release as a phase of one step.

  Args:
    loaded: (train, test), a result of `build.load_data`: inputs of the model, before private
      statistics normalise them.
  """
  train, test = loaded
  chosen = settings(config)
  # Of the first parameters only the shapes are read.
  _, model, params = build.start(config, train, random)
  apply = model.apply
  plan = privacy.make_plan(config, privacy.public_size(config, train))
  _check_model(config, train, params)
  write_inputs = build.inputs_writer(config.data, config.model, test)
  statistics = normalization.release(plan, random, train)
  if statistics is not None:
    train, test = (normalization.normalize(part, statistics) for part in (train, test))
  releasing = mechanism(config, plan, train.num_classes)
  released = train.without_empty_records()

  def step(state: Any, draw: Any) -> tuple[Any, left_out.Arrivals | None]:
    del draw
    targets = mechanisms.centred_labels(released.y, train.num_classes)
    # This is the key of step 0. The statistics of the inputs use another key.
    key = jax.random.fold_in(random.noise, 0)
    inputs = released.x
    directions = None
    count = chosen.directions
    if count is not None:
      # Orthonormal columns [width, count], drawn by the public key of the first parameters.
      width = math.prod(inputs.shape[1:])
      drawn = jax.random.normal(random.init, (width, count), jnp.float32)
      directions = np.linalg.qr(np.asarray(drawn, np.float64))[0]
      inputs = releasing.projected(released.x, directions)
    weights = releasing(key, inputs, targets).ridge(chosen.ridge)
    # A linear model of projected inputs is also a linear model of the inputs themselves.
    weights = weights if directions is None else directions @ weights
    head = state["params"]["params"][saved.HEAD]
    kernel = jnp.asarray(weights, jnp.float32).reshape(head["kernel"].shape)
    new = {"kernel": kernel, "bias": jnp.zeros_like(head["bias"])}
    counts = left_out.of_rows(released.x, targets) if shows_data(config) else None
    return {"params": {"params": {saved.HEAD: new}}, "step": state["step"] + 1}, counts

  def scores(state: Any) -> dict[str, float]:
    return metrics.evaluate(apply, state["params"], test)

  return Phase(
    num_steps=1,
    init=lambda: {"params": jax.tree.map(jnp.zeros_like, params), "step": jnp.int32(0)},
    step=step,
    draws=lambda start: range(start, 1),
    released=lambda state: normalization.beside(state["params"], statistics),
    evaluate=scores,
    # `launch.serve` reads the written facts of the inputs, so it needs no training data.
    write=lambda folder, state: write_inputs(folder),
    guarantee=guarantee_of(config, plan, releasing, train),
    save_every=1,
    steps_are="releases",
    arrivals=(lambda counts: counts) if shows_data(config) else None,
    before_steps=None if statistics is None else statistics._asdict(),
    planned=functools.partial(_planned_facts, config, plan, releasing),
    describe=lambda state, facts, rows: {
      "device": provenance.device(1, None),
      **left_out.clipped_cells(train, shown=shows_data(config)),
      **class_scores(apply, state["params"], test),
    },
  )


def guarantee_of(
  config: TrainConfig,
  plan: Plan,
  releasing: mechanisms.LeastSquares,
  train: data.Dataset,
) -> Guarantee:
  """Returns the guarantee of the run. Its statement describes what is released."""
  asked = guarantee.describe_attack_bound(attack_of(config.privacy), plan.delta)
  words = [asked, paragraph(releasing.statement())]
  if config.release:
    # The sums of this method are rounded to a finer grid than the gradients of a step.
    fine = min(finite.fine_step(std) for std in releasing.stds)
    grid = f"is rounded to multiples of {fine:g} or more, in units of the norms,"
    text = " ".join(guarantee.release_paragraph(plan).split())
    text, count = re.subn(r"is rounded to the grid of multiples of \S+", grid, text)
    assert count == 1
    words.append(paragraph(text))
  noted = guarantee.add_note(
    guarantee.of_plan(
      plan, plan.sampler.padded_batch_size - 1, budget=settings(config).epsilon_budget
    ),
    "\n\n".join(text for text in words if text),
  )
  # Features or a tokenizer add the same assumptions as in a run with steps.
  return features.add_note(config, noted, train)


def _check_model(config: TrainConfig, train: data.Dataset, params: Params) -> None:
  """Raises UserError unless targets are classes, inputs are numbers and the model is linear.

  Also raises UserError for more directions than an example has numbers.
  """
  reason = f"privacy={LEAST_SQUARES!r}"
  needs_classes(train, "privacy", LEAST_SQUARES)
  if train.x.dtype == np.int32:
    raise UserError(
      "needs inputs of numbers, data.name holds tokens",
      field="privacy",
      value=LEAST_SQUARES,
    )
  if train.num_classes < 2:
    raise UserError("needs two classes or more", field="privacy", value=LEAST_SQUARES)
  shapes = jax.tree.map(jnp.shape, params)
  width = math.prod(train.x.shape[1:])
  common.at_most(config, "privacy.directions", width, ", the numbers of one example")
  wanted = {"kernel": (width, train.num_classes), "bias": (train.num_classes,)}
  if shapes != {"params": {saved.HEAD: wanted}}:
    raise UserError(
      f"must be linear with {reason}, such as 'linear' or 'scatter_linear'; put other layers into "
      "the features",
      field="model.name",
      value=config.model.name,
    )


def _planned_facts(
  config: TrainConfig, plan: Plan, releasing: mechanisms.LeastSquares
) -> dict[str, Any]:
  """Returns the parts of result.json that are known before the release."""
  behind = features.trained_on(config.model.name, config.data.name)
  return {
    "task": "classification",
    **of_plan(config, plan),
    "sampler": "every example, once",
    "moment_weight": releasing.moment_weight,
    "ridge": settings(config).ridge,
    "directions": settings(config).directions,
    **({saved.PRETRAINED_ON: list(behind)} if behind else {}),
  }
