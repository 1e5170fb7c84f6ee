"""One run of private synthesis, from a `SynthesisConfig`.

With `method="kernel_mean"` the first step is the one release of the run, and the only step that
reads private records. Every later step updates the generator, usually several times. These updates
are post-processing, so they cost nothing. With `method="wgan_gp"` every step is one step of DP-SGD
(`critic_run`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import numpy as np
from dp_accounting import NoOpDpEvent

from dpjax.accounting.event_kinds.kind import DpEvent
from dpjax.accounting.text import paragraph
from dpjax.data import tables
from dpjax.data.target_kinds import needs_classes
from dpjax.experiments.config import common
from dpjax.experiments.kinds.central.features import check_images
from dpjax.experiments.kinds.synthesis.config import (
  KernelMean,
  SynthesisConfig,
  WassersteinGan,
  check,
)
from dpjax.experiments.kinds.synthesis.sampled_run import SampledRun, Samples
from dpjax.experiments.run import guarantee, left_out, writers
from dpjax.experiments.run.experiment import Experiment, Phase, Story, every, single
from dpjax.experiments.run.guarantee import Guarantee
from dpjax.experiments.run.run_keys import RunKeys
from dpjax.key_uses import KeyUse, key_for
from dpjax.mechanisms.class_sums import ClassSums
from dpjax.mechanisms.finite import fine_step
from dpjax.zoo.recipes.synthesis import Embedding, MeanFeatures, Synthesis

# Largest number of updates in a step. All updates of a step are compiled as one program.
_AT_ONCE = 50
_NOTHING = left_out.Arrivals(0, 0)


class PrivateSynthesis(Experiment[SynthesisConfig]):
  """One run of a generator of private images or rows, and the samples that it draws."""

  def check(self) -> None:
    check(self.config)

  def data(self) -> tuple[Any, Any]:
    """Returns (private data, public test data)."""
    return self.config.data.load()

  def check_data(self, data: Any) -> None:
    train = data[0]
    name = self.config.data.name
    needs_classes(train, "data.name", name)
    is_table = len(train.x.shape) == 2 and train.vocab_size is None
    if is_table:
      return
    check_images(train, "data.name", name)
    method = self.config.method
    # Of a table any side but 0 takes all columns.
    if isinstance(method, KernelMean):
      why = ", the places along an axis of an image"
      common.at_most(self.config, "method.side", max(train.x.shape[1:3]), why)

  def line(self, result: dict[str, Any]) -> str:
    return (
      f"{result['dataset']} {result['method']}: {writers.headline(result)} of classifiers that saw "
      f"samples alone, as many of each class; {guarantee.summary(result)}{writers.took(result)}"
    )

  def train(self, data: Any, keys: RunKeys) -> Story:
    return single(_phase(self.config, data[0], data[1], keys))


def _phase(config: SynthesisConfig, train: Any, test: Any, random: RunKeys) -> Phase:
  if isinstance(config.method, WassersteinGan):
    # Imported here: no other run needs the networks of a critic.
    from dpjax.experiments.kinds.synthesis import critic_run

    return critic_run.CriticRun(config, train, test, random).phase()
  return _Run(config, train, test, random).phase()


def guarantee_of(
  config: SynthesisConfig, mechanism: ClassSums, num_records: int | None
) -> Guarantee:
  """Returns the guarantee of a run. Only the first step has a cost; later steps are free.

  Args:
    num_records: public size of the private data; None: it is a secret.
  """
  event = mechanism.event(config.neighboring_relation)
  whole = guarantee.of_event(
    event,
    delta=config.delta,
    l2_bound=1.0,
    num_records=num_records,
    relation=config.neighboring_relation,
    budget=config.epsilon_budget,
    release=config.release,
  )
  nothing: DpEvent = NoOpDpEvent()
  note = paragraph(_words(config, mechanism))
  return guarantee.add_note(
    dataclasses.replace(
      whole,
      step_event=lambda step: nothing if step else event,
      remaining_event=lambda start: nothing if start else event,
      curve=lambda steps: whole.curve(min(steps, 1)),
      words=lambda steps, kind: whole.words(min(steps, 1), kind),
    ),
    note,
  )


def _words(config: SynthesisConfig, mechanism: ClassSums) -> str:
  text = (
    f"{mechanism.statement()} The features are public functions of one image. The generator, "
    "its samples, and every classifier of samples follow from this release alone: any number of "
    "updates and of samples costs nothing more."
  )
  if config.release:
    text += (
      " Release mode: the noise key has 256 bits of the operating system's entropy, and noisy "
      f"sums are rounded to multiples of {fine_step(mechanism.std):g} or less. Checkpoints hold "
      "the noise key: they stay as secret as the data."
    )
  return text


class _Run(SampledRun):
  """Holds the parts of one run: features, mechanism and generator."""

  def __init__(self, config: SynthesisConfig, train: Any, test: Any, random: RunKeys):
    super().__init__(config, train, test, random)
    method = config.method
    self.embedding: Embedding = method.embedding(train.x.shape[1:], config.seed)
    self.mechanism = method.mechanism(config, train.num_classes)
    declared = train.declaration
    self.synthesis = Synthesis(
      self.embedding,
      train.num_classes,
      num_steps=method.num_steps,
      per_class=config.per_class,
      learning_rate=config.learning_rate,
      num_latents=config.num_latents,
      hidden=config.hidden,
      categories=() if declared is None else tables.categories(declared),
    )
    # `at_once` divides the number of updates, so all steps after the release run the same program.
    self.at_once = math.gcd(method.num_steps, _AT_ONCE)
    self._sums: np.ndarray | None = None
    self._targets: Any = None

  @property
  def num_steps(self) -> int:
    """Returns the number of steps: one for the release, and the steps of the generator."""
    return 1 + self.config.method.num_steps // self.at_once

  @functools.cached_property
  def updates(self) -> Any:
    """Returns the compiled function that makes the `at_once` updates of a step."""
    return self.synthesis.update_fn()

  def init(self) -> dict[str, Any]:
    """Returns the state before the release."""
    params = self.synthesis.init(self.first_key())
    return {
      "sums": np.zeros((self.train.num_classes, self.embedding.width)),
      "params": params,
      "optimizer": self.synthesis.optimizer.init(params),
    }

  def step(
    self, state: dict[str, Any], number: int
  ) -> tuple[dict[str, Any], left_out.Arrivals]:
    """Returns the state after the release (number 0), or after `at_once` generator updates."""
    if number == 0:
      present = self.present
      key = jax.random.fold_in(self.random.noise, 0)
      chunks = self.embedding.chunks(present.x)
      sums = self.mechanism.of_chunks(key, chunks, present.y)
      counts = _NOTHING if self.config.release else left_out.of_rows(present.x)
      return {**state, "sums": sums}, counts
    key = key_for(KeyUse.PUBLIC_STEPS, self.random.init)
    keys = jax.random.split(jax.random.fold_in(key, number), self.at_once)
    params, optimizer, _ = self.updates(
      state["params"], state["optimizer"], keys, self.targets(state)
    )
    return {**state, "params": params, "optimizer": optimizer}, _NOTHING

  def targets(self, state: dict[str, Any]) -> MeanFeatures:
    """Returns the mean features that the generator is fitted to, from the noisy sums."""
    sums = np.asarray(state["sums"], np.float64)
    # The targets are computed once for each release, since every step needs them.
    if self._sums is None or not np.array_equal(self._sums, sums):
      self._sums = sums
      self._targets = self.embedding.targets(sums, self.mechanism.std)
    return self._targets

  def draw_samples(self, state: dict[str, Any]) -> Samples:
    """Draws samples of every class that is not empty by its noisy count. Draws none if all classes
    are empty."""
    present = np.flatnonzero(self.targets(state).present)
    if not len(present):
      shape = (0, *self.embedding.shape)
      return np.zeros(shape, np.float32), np.zeros(0, np.int32)
    draw = functools.partial(self.synthesis.images, state["params"])
    return self.drawn_of_classes(present, draw)

  def describe(self, state: Any, facts: Any, rows: Any) -> dict[str, Any]:
    """Returns the parts of the result that are known only at the end."""
    targets = self.targets(state)
    counts = [round(float(count), 1) for count in targets.counts]
    empty = np.flatnonzero(~np.asarray(targets.present)).tolist()
    if empty:
      writers.warn(
        f"no sample of {len(empty)} of {len(counts)} classes, {str(empty)[1:-1]:.60}: their noisy "
        "counts are too small to tell from none; a larger epsilon, or more records, shows them"
      )
    described = {"noisy_counts": counts, "classes_without_samples": empty}
    return described | super().describe(state, facts, rows)

  def phase(self) -> Phase:
    """Returns the phase that releases the noisy sums, then fits the generator."""
    config = self.config
    blocks = max(1, config.eval_every // self.at_once)
    return Phase(
      num_steps=self.num_steps,
      init=self.init,
      step=self.step,
      draws=lambda start: range(start, self.num_steps),
      released=lambda state: {"sums": state["sums"], "generator": state["params"]},
      evaluate=self.scores,
      write=self.write,
      guarantee=guarantee_of(config, self.mechanism, self.stated_size),
      row_at=functools.partial(every, blocks, self.num_steps),
      steps_are="steps: a release, then updates",
      arrivals=None if config.release else (lambda counts: counts),
      planned=lambda: {
        "task": "synthesis",
        "dataset": config.data.name,
        "method": "kernel_mean",
        "noise_multiplier": self.mechanism.noise_multiplier,
        "features": self.embedding.width,
        "feature_weights": self.embedding.weights,
        "updates": config.method.num_steps,
      },
      describe=self.describe,
    )
