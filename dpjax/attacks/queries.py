"""Several queries of one record: the model also sees flipped and shifted copies.

A model that was trained on copies is surer of all copies of a member, so each copy adds evidence
(Carlini et al. 2022, section 6.C). An attack scores each query alone, and a record gets the mean
of its scores. If training made no copies, further queries only add noise to the first one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from dpjax import validate
from dpjax.attacks.membership import Evidence
from dpjax.attacks.signals import Signal
from dpjax.types import Example, HostArray, Labelled, Params
from dpjax.validate import UserError

# Largest number of queries: the unshifted image and 8 shifted ones, each with its mirror image.
MOST_QUERIES = 18
_PLACES = ((0, 0), (0, 1), (0, -1), (1, 0), (-1, 0), (1, 1), (1, -1), (-1, 1), (-1, -1))


def augment(x: HostArray, num_queries: int, *, shift: int = 1) -> list[np.ndarray]:
  """Returns `num_queries` copies of images [n, H, W, C]: the originals, mirrored ones, then
  shifted ones.

  Copies 2 k and 2 k + 1 are each other's mirror image. A shift moves by `shift` pixels in one of
  eight directions, and reflection fills the uncovered pixels.

  Raises UserError for more than 18 queries, several queries of records that are no images, or a
  shift that is not smaller than an image.

  >>> [copy[0, 0, :, 0].tolist() for copy in augment(np.arange(3.0).reshape(1, 1, 3, 1), 2)]
  [[0.0, 1.0, 2.0], [2.0, 1.0, 0.0]]
  """
  validate.integer_in(1, MOST_QUERIES, num_queries=num_queries)
  validate.integer_at_least(1, shift=shift)
  images = np.asarray(x)
  if num_queries == 1:
    return [images]
  if images.ndim != 4:
    raise UserError(
      f"needs images [n, H, W, C] to flip and shift, got shape {images.shape}; must be 1",
      field="num_queries",
      value=num_queries,
    )
  if num_queries > 2 and shift >= min(images.shape[1:3]):
    raise UserError(
      f"must be below {min(images.shape[1:3])}, the images' size",
      field="shift",
      value=shift,
    )
  height, width = images.shape[1:3]
  margin = ((0, 0), (shift, shift), (shift, shift), (0, 0))
  padded = np.pad(images, margin, mode="reflect") if num_queries > 2 else images
  copies = []
  for query in range(num_queries):
    down, right = _PLACES[query // 2]
    copy = images
    if down or right:
      top = shift * (1 - down)
      left = shift * (1 - right)
      copy = padded[:, top : top + height, left : left + width]
    copies.append(copy[:, :, ::-1] if query % 2 else copy)
  return copies


def queries_of_model(signal: Signal, num_queries: int, *, shift: int = 1) -> Signal:
  """Returns a signal that scores every copy of n records: [num_queries * n], query by query.

  Pass it to `train_shadows` together with `num_scores=num_queries * n`.

  >>> from dpjax.types import Example
  >>> left = lambda params, records: records.x[:, 0, 0, 0]
  >>> image = Example(np.arange(3.0).reshape(1, 1, 3, 1), np.array([0]))
  >>> queries_of_model(left, 2)(None, image).tolist()
  [0.0, 2.0]
  """

  def asked(params: Params, records: Labelled) -> np.ndarray:
    copies = augment(np.asarray(records.x), num_queries, shift=shift)
    inputs = [Example(np.ascontiguousarray(copy), records.y) for copy in copies]
    return np.concatenate([signal(params, each) for each in inputs])

  return asked


def mean_score(
  attack: Callable[[Evidence], np.ndarray], queries: Sequence[Evidence]
) -> np.ndarray:
  """Returns the mean over queries of an attack's scores: [n].

  Args:
    queries: one `Evidence` of the same records for each query.

  Raises UserError for no queries, or queries of different numbers of records.

  >>> held = np.eye(2, dtype=bool)
  >>> queries = [Evidence(odds, np.zeros((2, 2)), held) for odds in ([0.0, 2.0], [4.0, 2.0])]
  >>> mean_score(lambda evidence: evidence.target, queries)
  array([2., 2.])
  """
  scores = [attack(evidence) for evidence in queries]
  if not scores or len({score.shape for score in scores}) > 1:
    raise UserError(
      "must hold at least one Evidence, all of the same records", field="queries"
    )
  return np.mean(scores, axis=0)
