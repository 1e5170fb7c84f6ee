"""Typed configuration of a run of private synthesis. A config file returns it."""

from __future__ import annotations

import dataclasses
import functools
from typing import Annotated, Any

from dpjax.experiments.config import common, rules
from dpjax.experiments.config.choices import Choice
from dpjax.experiments.config.fields import WithChoices
from dpjax.experiments.config.sections import ExamplesConfig
from dpjax.mechanisms.additive import analytic_noise_multiplier
from dpjax.mechanisms.class_sums import ClassSums
from dpjax.validate import UserError
from dpjax.zoo.recipes.synthesis import Embedding

# The exact noise is multiplied by this factor. So an accountant with a small upward error still
# finds at most epsilon.
_MARGIN = 1 + 1e-5
# The generator is fitted to the noisy sums in float32, which holds larger noise as infinity.
_NOISE = rules.within_range(1e-30, 1e30)


@dataclasses.dataclass(frozen=True)
class KernelMean(rules.Checked):
  """Noisy embedding of all records, and a generator that is fitted to it (DP-MERF)."""

  num_frequencies: Annotated[
    int, rules.between(0, 10**5), "random frequencies of a Gaussian kernel; 0: none"
  ] = 100
  length_scale: Annotated[
    float, rules.POSITIVE, rules.IN_FLOAT32, "of that kernel, in pixels' units"
  ] = 3.0
  side: Annotated[
    int,
    rules.between(0, 32),
    "low frequencies of each axis, whose second moments are released; 0: none; of a table any "
    "other number: all columns",
  ] = 6
  moments_share: Annotated[
    float, rules.OPEN_UNIT, "of the release's squared norm; the others keep the rest"
  ] = 0.8
  count_share: Annotated[
    float, rules.OPEN_UNIT, "of the squared norm, for numbers of records"
  ] = 0.04
  noise_multiplier: Annotated[
    float | None, _NOISE, "of the release; none: what epsilon allows"
  ] = None
  num_steps: Annotated[
    int, rules.between(1, rules.MOST_STEPS), "updates of the generator; they cost nothing"
  ] = 1000

  def mechanism(self, config: SynthesisConfig, num_classes: int) -> ClassSums:
    """Returns the mechanism of the release, with `noise_multiplier` or the noise for `epsilon`."""
    noise = self.noise_multiplier
    if noise is None:
      noise = _MARGIN * analytic_noise_multiplier(config.epsilon, config.delta)
    return ClassSums(noise, num_classes, neighboring_relation=config.neighboring_relation)

  def embedding(self, shape: tuple[int, ...], seed: int) -> Embedding:
    """Returns the features of records of this shape. They are public, and depend on no data."""
    return Embedding(
      shape,
      num_frequencies=self.num_frequencies,
      length_scale=self.length_scale,
      side=self.side,
      moments_share=self.moments_share,
      count_share=self.count_share,
      seed=seed,
    )


@dataclasses.dataclass(frozen=True)
class WassersteinGan(rules.Checked):
  """A critic under DP-SGD with a gradient penalty, and a generator trained by it (WGAN-GP)."""

  batch_size: Annotated[int, common.COUNT, "expected records of a step of the critic"] = 128
  epochs: Annotated[
    int, rules.between(1, rules.MOST_EPOCHS), "expected steps of each record"
  ] = 20
  l2_clip_norm: Annotated[common.ClipNorm, "of one record's gradient"] = 1.0
  penalty: Annotated[
    float, rules.POSITIVE, rules.IN_FLOAT32, "weight of the gradient penalty"
  ] = 1.0
  critic_steps: Annotated[
    int, common.COUNT, "of the critic before each step of the generator"
  ] = 1
  critic_hidden: Annotated[int, rules.between(1, 10**4), "width of the critic"] = 64


METHODS = {"kernel_mean": KernelMean, "wgan_gp": WassersteinGan}


@dataclasses.dataclass
class SynthesisConfig(WithChoices):
  """Configuration of a run: a method that reads the records, a generator, and samples.

  The test set scores classifiers that saw samples alone.
  """

  method: Annotated[Any, Choice(METHODS), "what reads the records"] = "kernel_mean"
  data: ExamplesConfig = dataclasses.field(default_factory=ExamplesConfig)
  epsilon: Annotated[float, rules.POSITIVE, "of all that is released"] = 1.0
  delta: Annotated[common.Delta, "of the same"] = 1e-5
  epsilon_budget: common.EpsilonBudget = None
  neighboring_relation: Annotated[common.RecordRelation, "see the guide"] = (
    "add_or_remove_one"
  )
  per_class: Annotated[
    int, rules.between(2, 10**5), "generated images of a class in an update"
  ] = 50
  learning_rate: Annotated[float, common.LearningRate, "of Adam, first"] = 2e-3
  num_latents: Annotated[int, rules.between(1, 10**4), "random numbers of an image"] = 32
  hidden: Annotated[int, rules.between(1, 10**4), "width of the generator"] = 256
  num_samples: Annotated[
    int, rules.between(1, 10**6), "images that are written; they cost nothing"
  ] = 2000
  attack: Annotated[
    bool, "also attacks the samples by their distance to members; private, not for release"
  ] = False
  eval_every: Annotated[int, common.COUNT, "updates between two scores, about"] = 10**6
  seed: common.Seed = 0
  noise_seed: common.NoiseSeed = None
  release: common.Release = False


def check(config: SynthesisConfig) -> None:
  """Raises UserError if the config is wrong; loads no data."""
  common.check_types(config)
  if config.release:
    why = " with release=True: the attack reads members, and its result is private"
    common.only(config, "attack", [False], why)
  if isinstance(config.method, WassersteinGan):
    why = " with method='wgan_gp', whose noise is not rounded to a grid"
    common.only(config, "release", [False], why)
    why = (
      " with method='wgan_gp', whose batches are Poisson samples; 'kernel_mean' takes both"
    )
    common.only(config, "neighboring_relation", ["add_or_remove_one"], why)
    return
  _check_release(config, config.method)


def _check_release(config: SynthesisConfig, method: KernelMean) -> None:
  if not method.num_frequencies and not method.side:
    raise UserError("must be > 0 where side=0", field="method.num_frequencies", value=0)
  read = functools.partial(common.read_if, config)
  solved = method.noise_multiplier is None
  read(solved, "method.noise_multiplier=None, which is solved for", "epsilon")
  both = method.num_frequencies > 0 and method.side > 0
  read(method.num_frequencies > 0, "method.num_frequencies > 0", "method.length_scale")
  needed = "method.num_frequencies > 0 and method.side > 0"
  read(both, needed, "method.moments_share")
  # This raises UserError if no noise reaches epsilon.
  _ = method.mechanism(config, 1)
