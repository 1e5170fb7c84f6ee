"""Draws, scores and writes samples of a generator in a run of private synthesis."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpjax.data import tables
from dpjax.experiments.kinds.synthesis import sample_scores
from dpjax.experiments.kinds.synthesis.config import SynthesisConfig
from dpjax.experiments.run import left_out, sizes, writers
from dpjax.experiments.run.experiment import Scores
from dpjax.experiments.run.run_keys import RunKeys
from dpjax.key_uses import KeyUse, key_for

# Number of samples that are drawn at once.
_AT_ONCE = 1000

Samples = tuple[np.ndarray, np.ndarray]


class SampledRun:
  """Base of runs that draw, score, attack and write samples of a generator.

  Subclasses define `draw_samples`, which draws samples.
  """

  def __init__(self, config: SynthesisConfig, train: Any, test: Any, random: RunKeys):
    self.config = config
    self.train = train
    self.test = test
    self.random = random
    self._samples: tuple[Any, Samples] | None = None  # of the last state
    self._scored: tuple[Any, Scores] = (None, {})

  def draw_samples(self, state: Any) -> Samples:
    """Returns samples drawn from a state: (images [n, H, W, C] or rows [n, d], labels [n])."""
    raise NotImplementedError

  @functools.cached_property
  def present(self) -> Any:
    """Returns the private data without empty records."""
    return self.train.without_empty_records()

  @property
  def stated_size(self) -> int | None:
    """Returns the number of records that the guarantee may name; None: it is a secret."""
    return sizes.named_size(
      len(self.train), self.train.nominal_size, relation=self.config.neighboring_relation
    )

  def first_key(self) -> jax.Array:
    """Returns the public key of the first parameters."""
    return key_for(KeyUse.PARAMETERS, self.random.init)

  def drawn_of_classes(
    self, classes: np.ndarray, draw: Callable[[jax.Array, jax.Array], Any]
  ) -> Samples:
    """Draws `num_samples` samples in blocks. The classes' numbers of samples differ by at most 1.

    Args:
      classes: labels of the classes.
      draw: function (key, labels [b]) -> images [b, H, W, C] or rows [b, d].
    """
    labels = np.resize(classes, self.config.num_samples).astype(np.int32)
    key = key_for(KeyUse.SAMPLES, self.random.init)
    parts = [
      np.asarray(
        draw(jax.random.fold_in(key, start), jnp.asarray(labels[start : start + _AT_ONCE]))
      )
      for start in range(0, len(labels), _AT_ONCE)
    ]
    return np.concatenate(parts), labels

  def samples(self, state: Any) -> Samples:
    """Returns (images [n, H, W, C] or rows [n, d], labels [n]) of a state.

    Equal states give equal samples. Rows of a declared table are the nearest that its cells can
    have."""
    # The samples of a state are kept, since the last row, the result and the files all need them.
    if self._samples is None or self._samples[0] is not state:
      samples = self.draw_samples(state)
      if self.train.declaration is not None:
        samples = tables.nearest_inputs(samples[0], self.train.declaration), samples[1]
      self._samples = (state, samples)
    return self._samples[1]

  def scores(self, state: Any) -> Scores:
    """Returns the accuracy of classifiers that saw samples alone, on the test set."""
    images, labels = self.samples(state)
    if self._scored[0] is not images:
      scored = sample_scores.downstream(images, labels, self.test.x, self.test.y)
      self._scored = (images, scored)
    return self._scored[1]

  def write(self, folder: pathlib.Path, state: Any) -> None:
    """Writes the samples of a state into a folder; see `sample_scores.write`."""
    images, labels = self.samples(state)
    sample_scores.write(folder, images, labels, self.train.declaration)

  def describe(self, state: Any, facts: Any, rows: Any) -> dict[str, Any]:
    """Returns the parts of the result that are known only at the end."""
    del facts, rows
    _, labels = self.samples(state)
    counts = np.bincount(labels, minlength=self.train.num_classes)
    described: dict[str, Any] = {
      "num_samples": self.config.num_samples,
      "samples_by_class": counts.tolist(),
    }
    described |= self._against_largest(self.scores(state)["accuracy"])
    described |= left_out.clipped_cells(self.train, shown=not self.config.release)
    if self.config.attack:
      images, _ = self.samples(state)
      leak = sample_scores.attack(images, self.present.x, self.test.x)
      described |= {f"not_private/attack_{name}": value for name, value in leak.items()}
    return described

  def _against_largest(self, accuracy: float) -> dict[str, float]:
    """Returns the share of the largest class of the public test rows. Warns if always giving this
    class is as accurate as the classifiers, as with samples of equal classes it may be."""
    largest = float(np.bincount(np.asarray(self.test.y)).max() / len(self.test.y))
    if accuracy <= largest:
      writers.warn(
        f"test accuracy {accuracy:.4f} is no more than the largest class has alone, {largest:.4f} "
        "of the test rows; samples have all classes alike, so weight each by its true share "
        "(docs/synthesis.md)"
      )
    return {"test_largest_class": largest}
