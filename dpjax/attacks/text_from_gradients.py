"""Reads text from a transformer's gradient, exactly if there are fewer tokens than features.

DAGER (Petrov et al. 2024, arXiv:2405.15586) for decoders. The gradient of a kernel is a sum over
tokens of (input of the layer)(gradient of its output)^T. With fewer tokens than the layer has
inputs, the columns of the gradient span exactly the inputs of these tokens. So a guess is tested by
its distance from the span. The first block tests one token at one position, and the second block
tests a whole beginning of a line. The attack needs no gradient search and no labels.

| what is seen                         | what it spans                       | tokens, at most |
| ------------------------------------ | ----------------------------------- | --------------- |
| gradient of a kernel [d, P]          | the inputs x                        | d - 1           |
| gradient of LoRA's A [d, r], B not 0 | some r combinations of the inputs   | r               |
| gradient of LoRA's B [r, P], any B   | A^T x, which the server can compute | r - 1           |

LoRA starts with B = 0. Then the gradient of A is 0, and only the gradient of B shows the text.
Clipping of each line or of all only scales each input, which changes no span. Noise fills all
dimensions. The attacker can then only rank tokens by their distance from the largest directions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpjax import validate
from dpjax.attacks import signals
from dpjax.types import HostArray, Params
from dpjax.validate import UserError

# Function from parameters and tokens [n, T] to the inputs [n, T, d] of each block's attacked layer.
Inputs = Callable[[Params, Any], list[Any]]

# Singular values below this share of the largest are rounding of a float32 gradient.
_ROUNDING = 3e-6
# An input below this distance, as a share of its length, counts as inside the span.
_NEAR = 1e-3
# Number of line beginnings that are evaluated at once.
_PART = 16


def attention_inputs(model: Any, num_blocks: int = 2) -> Inputs:
  """Returns the function that computes what enters the attention of the first blocks.

  Args:
    model: a model "transformer" of `dpjax.zoo.networks`.
    num_blocks: number of blocks, from the first on; at most those of the model.

  >>> from dpjax import models  # doctest: +SLOW
  >>> from dpjax.zoo import networks
  >>> model = networks.build("transformer", num_classes=5, num_layers=2, num_heads=1, features=4)
  >>> params = model.init(jax.random.key(0), jnp.zeros((1, 3), int))
  >>> [x.shape for x in attention_inputs(model)(params, jnp.zeros((2, 3), int))]
  [(2, 3, 4), (2, 3, 4)]
  """
  validate.integer_in(1, getattr(model, "num_layers", 1), num_blocks=num_blocks)

  @jax.jit
  def inputs(params: Params, tokens: Any) -> list[Any]:
    _, state = model.apply(
      params,
      tokens,
      capture_intermediates=lambda module, _: module.name == "attention_norm",
      mutable=["intermediates"],
    )
    blocks = state["intermediates"]
    return [
      blocks[f"block_{i}"]["attention_norm"]["__call__"][0] for i in range(num_blocks)
    ]

  return inputs


def span(gradient: HostArray, *, rank: int | None = None) -> np.ndarray:
  """Returns an orthonormal basis [d, r] of the columns of a gradient [d, P].

  Args:
    gradient: gradient of a kernel or of a LoRA factor, with the layer's inputs along the first
      axis.
    rank: number of directions, the largest first; None: all that are larger than rounding. Noise
      fills all directions, so an attacker then has to assume a rank.

  Raises UserError for anything but a matrix of finite numbers, or a rank outside [0, min(d, P)].

  >>> span(np.outer([3.0, 4.0], [1.0, 2.0, 0.0])).round(3).tolist()  # up to its sign
  [[-0.6], [-0.8]]
  """
  matrix = signals.numbers("gradient", gradient)
  if matrix.ndim != 2 or not np.isfinite(matrix).all():
    raise UserError(
      "must be a matrix of finite numbers", field="gradient.shape", value=matrix.shape
    )
  left, values, _ = np.linalg.svd(matrix, full_matrices=False)
  if rank is None:
    rank = int(np.sum(values > _ROUNDING * values[0])) if values.size else 0
  else:
    validate.integer_in(0, values.size, rank=rank)
  return left[:, :rank]


def distance(basis: np.ndarray, inputs: HostArray) -> np.ndarray:
  """Returns the sines of the angles between inputs [n, d] and a span [d, r]: [n], 0 to 1.

  >>> distance(np.array([[1.0], [0.0]]), [[2.0, 0.0], [3.0, 3.0]]).round(4).tolist()
  [0.0, 0.7071]
  """
  vectors = signals.numbers("inputs", inputs)
  lengths = np.linalg.norm(vectors, axis=1)
  # The sine is computed from the residue, since 1 - cosine^2 has only half of the digits.
  residues = np.linalg.norm(vectors - (vectors @ basis) @ basis.T, axis=1)
  # An input of zeros lies in every span and tells nothing, so it gets the largest distance.
  return np.where(lengths > 0, residues / np.where(lengths > 0, lengths, 1.0), 1.0)


@dataclasses.dataclass(frozen=True)
class SpanAttack:
  """Reads lines of text from the gradients of one kernel in each of the first blocks.

  Args:
    inputs: function that computes the inputs of these kernels, such as `attention_inputs(model)`.
    vocab_size: number of different tokens.
    length: number of positions that are tried, the largest length of a line.
    skip: tokens that no line contains, such as padding.
    near: `distance` from the span below which an input counts as in the span.
    most: largest number of tokens at a position, and of line beginnings, that are followed up.

  Guarantee: none. Suppose that there is no noise, and no more tokens in all than the module's table
  allows. Then the true lines are among those returned, up to rounding. Exceptions are lines that
  `most` cuts off, or that a longer candidate continues.
  """

  inputs: Inputs
  vocab_size: int
  length: int
  skip: tuple[int, ...] = ()
  near: float = _NEAR
  most: int = 64

  def __post_init__(self):
    validate.integer_at_least(2, vocab_size=self.vocab_size)
    validate.integer_at_least(1, length=self.length, most=self.most)
    validate.positive(near=self.near)

  def token_distances(
    self,
    params: Params,
    gradient: HostArray,
    *,
    rank: int | None = None,
    project: Any = None,
  ) -> np.ndarray:
    """Returns how far each token at each position is from the span of the first gradient.

    Args:
      params: parameters at which the gradient was taken.
      gradient: gradient of the first block's kernel [d, P], or of a LoRA factor.
      rank: see `span`.
      project: LoRA's A [d, r], if the gradient is that of B; else None.

    Returns:
      Distances [length, vocab_size]. They are infinite for the tokens to skip, and all infinite if
      the span is empty or the whole space.
    """
    tokens = np.tile(np.arange(self.vocab_size)[:, None], (1, self.length))
    first = np.asarray(self.inputs(params, jnp.asarray(tokens, jnp.int32))[0], np.float64)
    flat = _through_lora(first.reshape(-1, first.shape[-1]), project)
    basis = _fitting(gradient, flat.shape[1], rank)
    distances = np.full(len(flat), np.inf)
    # A span of all dimensions contains every token, and an empty span contains none.
    if 0 < basis.shape[1] < basis.shape[0]:
      distances = distance(basis, flat)
    table = distances.reshape(self.vocab_size, self.length).T
    table[:, list(self.skip)] = np.inf
    return table

  def __call__(
    self,
    params: Params,
    gradients: list[Any],
    *,
    projects: list[Any] | None = None,
  ) -> list[list[int]]:
    """Returns the lines that the gradients show, the longest first.

    Args:
      params: parameters at which the gradients were taken.
      gradients: gradient of the first block's kernel, then that of the second's. The second tells
        which tokens are in one line; it is not needed for a single line.
      projects: LoRA's A of each block, if the gradients are those of B; else None.

    Raises UserError for no gradient, or gradients that do not fit the inputs.
    """
    if not gradients:
      raise UserError("must hold that of the first block", field="gradients")
    projects = projects or [None] * len(gradients)
    near = self.token_distances(params, gradients[0], project=projects[0])
    lines: list[list[int]] = [[]]
    ended: list[list[int]] = []
    for position in range(self.length):
      tokens = np.argsort(near[position], kind="stable")
      tokens = tokens[near[position][tokens] < self.near][: self.most]
      longer = [[*line, int(token)] for line in lines for token in tokens]
      if len(gradients) > 1 and longer:
        longer = self._of_one_line(params, longer, gradients[1], projects[1])
      # A beginning that nothing continues is a whole line.
      continued = {tuple(line[:-1]) for line in longer}
      ended += [line for line in lines if line and tuple(line) not in continued]
      lines = longer[: self.most]
      if not lines:
        break
    return sorted(ended + [line for line in lines if line], key=len, reverse=True)

  def _of_one_line(
    self, params: Params, lines: list[list[int]], gradient: HostArray, project: Any
  ) -> list[list[int]]:
    """Returns the beginnings of lines whose last input to block 2 is in the gradient's span.

    They come nearest first. If the span is empty or the whole space, all are returned.
    """
    last = len(lines[0]) - 1
    # All parts have one size, so that one compilation serves all numbers of lines.
    count = len(lines) + -len(lines) % _PART
    tokens = np.zeros((count, self.length), np.int32)
    # Attention is causal: later tokens do not change the input at the last position.
    tokens[: len(lines), : last + 1] = lines
    parts = np.split(tokens, count // _PART)
    second = [self.inputs(params, jnp.asarray(part))[1][:, last] for part in parts]
    inputs = np.concatenate(second).astype(np.float64)[: len(lines)]
    inputs = _through_lora(inputs, project)
    basis = _fitting(gradient, inputs.shape[1], None)
    if not 0 < basis.shape[1] < basis.shape[0]:
      return lines
    distances = distance(basis, inputs)
    return [
      lines[i] for i in np.argsort(distances, kind="stable") if distances[i] < self.near
    ]


def _through_lora(inputs: np.ndarray, project: Any) -> np.ndarray:
  """Returns inputs [n, d] unchanged if `project` is None, or mapped by LoRA's A to [n, r]."""
  if project is None:
    return inputs
  factor = signals.numbers("projects", project)
  if factor.ndim != 2 or len(factor) != inputs.shape[1]:
    raise UserError(
      f"must be LoRA's A [{inputs.shape[1]}, r]", field="projects.shape", value=factor.shape
    )
  return inputs @ factor


def _fitting(gradient: HostArray, size: int, rank: int | None) -> np.ndarray:
  basis = span(gradient, rank=rank)
  if len(basis) != size:
    raise UserError(
      f"must have {size} rows, as the layer's inputs have numbers",
      field="gradients.shape",
      value=np.shape(gradient),
    )
  return basis


def tokens_recovered(truth: HostArray, lines: list[list[int]]) -> int:
  """Returns how many tokens of the true line are at their place in the best of `lines`.

  >>> tokens_recovered([5, 6, 7], [[5, 1, 7, 9], [5]])
  2
  """
  row = np.asarray(truth)
  matches = [sum(a == b for a, b in zip(row.tolist(), line)) for line in lines]
  return max(matches, default=0)
