"""Inference on encrypted images: dense - square - dense under CKKS.

| who            | learns                                                                   |
| -------------- | ------------------------------------------------------------------------ |
| image owner    | the logits; with `packed` also other sums over hidden values, see below  |
| model owner    | the number of queries; nothing of the images or of the logits            |

Guarantee: the images have 128 bits of CKKS against a model owner that follows the protocol. The
MODEL has none: with `packed`, slots that hold no logit hold other sums over weights. The noise of
an answer depends on the weights, too (no circuit privacy). Treat the weights as known to anyone who
asks often. The image owner keeps raw decryptions: anyone who gets one may learn the key (Li and
Micciancio 2021).

| layout   | each ciphertext holds           | for                                             |
| -------- | ------------------------------- | ----------------------------------------------- |
| `packed` | several whole images            | few images: an answer in a fraction of a second |
| `pixels` | one pixel of up to 4,096 images | thousands at once: least time for each image    |

Measured on MNIST with 64 hidden units, on 2 busy CPU cores: `packed` answers four images in .2 s,
with 81 kB of messages an image. `pixels` takes 40 to 46 s for up to 4,096 images, so it is faster
from about 900 images on (`configs/secure/inference_mnist.py`).

Source: Gilad-Bachrach et al. 2016 (CryptoNets: square activations, a pixel a ciphertext);
Juvekar et al. 2018 (GAZELLE, hybrid products: as many rotations as there are outputs, by
baby and giant steps); Halevi and Shoup 2014.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from dpjax import validate
from dpjax.secure.homomorphic.ckks import (
  Chain,
  PublicKeys,
  SecretKeys,
  SlotEvaluator,
  rotations_of,
)
from dpjax.validate import UserError, Verbatim

# A chain for three products (dense, square, dense) takes 216 of the 218 bits of its degree.
CHAIN = Chain(levels=3, scale_bits=36, end_bits=54)
# A logit with a larger absolute value wraps around.
_MOST = 2.0 ** (CHAIN.end_bits - CHAIN.scale_bits - 1)
# Largest `SquareNetwork.logit_error` of a network that is accepted.
MOST_ERROR = 0.1
LAYOUTS = ("packed", "pixels")


class SquareNetwork(NamedTuple):
  """Plain weights of a network dense - square - dense, as the model's owner has them."""

  kernel: np.ndarray  # [d, h]
  bias: np.ndarray  # [h]
  head: np.ndarray  # [h, k]
  head_bias: np.ndarray  # [k]

  def logits(self, x: np.ndarray) -> np.ndarray:
    """Returns logits [n, k] of images [n, d] in float64, to compare an answer with."""
    return (x @ self.kernel + self.bias) ** 2 @ self.head + self.head_bias

  @property
  def largest_logit(self) -> float:
    """Bound on the absolute logits of an image in [-1, 1]."""
    hidden = np.abs(self.kernel).sum(axis=0) + np.abs(self.bias)
    return float((hidden**2 @ np.abs(self.head) + np.abs(self.head_bias)).max())

  @property
  def logit_error(self) -> float:
    """Estimates the error of a logit on ciphertexts.

    This is no bound, but standard deviations of rounding, times 16 for rotations and sums. It is
    large if the weights of one layer are much larger than those of the other.
    """
    hidden = float((np.abs(self.kernel).sum(axis=0) + np.abs(self.bias)).max())
    unit = 16 * CHAIN.error
    width = len(self.bias)
    square = 2 * hidden * unit + unit
    rounded = CHAIN.encoding_error * width**0.5 * hidden**2
    return float(np.abs(self.head).sum(axis=0).max()) * square + rounded + unit


def network_of(params: Mapping[str, Any]) -> SquareNetwork:
  """Returns the network of an `Mlp`'s parameters, with one hidden layer and activation="square".

  Raises:
    UserError: layers other than dense_0 and head.
  """
  layers = params.get("params", params)
  if {*layers} != {"dense_0", "head"}:
    raise UserError(
      f"have layers {sorted(layers)}; must have dense_0 and head", field="params"
    )
  held = [layers[name][part] for name in ("dense_0", "head") for part in ("kernel", "bias")]
  return SquareNetwork(*(np.asarray(part, np.float64) for part in held))


class _Layout(Protocol):
  d: int
  questions: int  # ciphertexts of a question
  answers: int
  images_each: int  # largest number of images of a question
  rotations: list[int]

  def pack(self, images: np.ndarray) -> list[np.ndarray]: ...  # [<= images_each, d]
  def unpack(self, slots: Sequence[np.ndarray]) -> np.ndarray: ...  # [images_each, k]
  def encode_weights(
    self, on: SlotEvaluator, net: SquareNetwork
  ) -> Any: ...  # for `answer`
  def answer(self, on: SlotEvaluator, weights: Any, x: Sequence[Any]) -> list[Any]: ...


def _power(number: float) -> int:
  """Returns the smallest power of two that is at least `number`."""
  return 1 << max(0, int(np.ceil(number)) - 1).bit_length()


class _Packed:
  """Layout in blocks of B slots. Each block holds h empty slots, and then one image.

  h is the number of hidden units, rounded up to a power of two. A product with a matrix W sums
  W[q, p mod h] x[q] over q in [p, p + h), for each slot p. That needs x at h rotations,
  which b baby steps and h / b giant steps make. The slots p, p + h, ... of a block then hold parts
  of one output. The head does the same with rotations to the right.
  """

  def __init__(self, num_inputs: int, hidden: int, classes: int):
    self.d = num_inputs
    self.h = _power(hidden)
    self.k = _power(classes)
    self.block = self.h * _power((num_inputs + self.h) / self.h)
    if self.h + self.k > self.block or self.block > CHAIN.slots:
      raise UserError(
        f"with {hidden} hidden units and {classes} classes an image takes "
        f"{max(self.block, self.h + self.k)} slots; must be at most "
        f"{CHAIN.slots}",
        field="num_inputs",
        value=num_inputs,
      )
    self.classes = classes
    self.images_each = CHAIN.slots // self.block
    self.questions = self.answers = 1
    # b baby and h / b giant steps are fewest if b is about the square root of h.
    self.baby = _power(self.h**0.5)
    self.parts = (self.block // self.h, _power((self.h + self.k) / self.k))
    folds = rotations_of([self.h, self.k], self.parts)
    self.rotations = [1, self.baby, CHAIN.slots - 1, *folds]

  def pack(self, images: np.ndarray) -> list[np.ndarray]:
    slots = np.zeros((self.images_each, self.block))
    slots[: len(images), self.h : self.h + self.d] = images
    return [slots.ravel()]

  def unpack(self, slots: Sequence[np.ndarray]) -> np.ndarray:
    return slots[0].reshape(self.images_each, self.block)[:, : self.classes]

  def answer(self, on: SlotEvaluator, weights: Any, x: Sequence[Any]) -> list[Any]:
    first, bias, head, head_bias = weights
    turned = [x[0]]
    for _ in range(1, min(self.baby, self.h)):
      turned.append(on.rotate(turned[-1], 1))
    whole = None
    # Giant steps begin with the farthest: each rotation moves all previous parts by b slots.
    for row in reversed(first):
      part = on.weighted_sum(list(zip(turned, row)))
      whole = part if whole is None else on.add(on.rotate(whole, self.baby), part)
    hidden = on.plus(on.fold(whole, self.h, self.parts[0]), bias)
    moved = on.products([(hidden, hidden)])
    pairs = []
    for plain in head:
      pairs.append((moved, plain))
      moved = on.rotate(moved, CHAIN.slots - 1)
    logits = on.fold(on.weighted_sum(pairs), self.k, self.parts[1])
    return [on.plus(logits, head_bias)]

  def encode_weights(self, on: SlotEvaluator, net: SquareNetwork) -> Any:
    """Encodes the weights as SEAL's plaintexts, once for all queries."""
    p = np.arange(self.block)
    kernel = np.zeros((self.block, self.h))  # [q, hidden]
    kernel[self.h : self.h + self.d, : net.kernel.shape[1]] = net.kernel
    head = np.zeros((self.block, self.k))  # [hidden, class]
    head[: net.head.shape[0], : self.classes] = net.head
    giants = [
      [
        on.encode(np.roll(self._tile(_diagonal(kernel, p, giant + baby)), giant), 3)
        for baby in range(min(self.baby, self.h))
      ]
      for giant in range(0, self.h, self.baby)
    ]
    heads = [on.encode(self._tile(_diagonal(head, p, -t)), 1) for t in range(self.k)]
    return giants, self._spread(net.bias), heads, self._spread(net.head_bias)

  def _tile(self, block: np.ndarray) -> np.ndarray:
    return np.tile(block, self.images_each)

  def _spread(self, bias: np.ndarray) -> np.ndarray:
    block = np.zeros(self.block)
    block[: len(bias)] = bias
    return self._tile(block)


def _diagonal(matrix: np.ndarray, p: np.ndarray, shift: int) -> np.ndarray:
  """Returns [B]: for slot p the matrix entry that multiplies slot p + shift, 0 beyond the block."""
  q = p + shift
  inside = (q >= 0) & (q < len(matrix))
  return np.where(inside, matrix[np.clip(q, 0, len(matrix) - 1), p % matrix.shape[1]], 0.0)


class _Pixels:
  """Layout with a ciphertext for each pixel and an image in each slot.

  It needs no rotations, and each weight is a single number for all slots.
  """

  rotations: list[int] = []  # noqa: RUF012 - shared, never changed

  def __init__(self, num_inputs: int, hidden: int, classes: int):
    self.d = num_inputs
    self.classes = classes
    self.images_each = CHAIN.slots
    self.questions = num_inputs
    self.answers = classes

  def pack(self, images: np.ndarray) -> list[np.ndarray]:
    return list(np.asarray(images, np.float64).T)

  def unpack(self, slots: Sequence[np.ndarray]) -> np.ndarray:
    return np.stack(list(slots), axis=1)

  def encode_weights(self, on: SlotEvaluator, net: SquareNetwork) -> SquareNetwork:
    """Returns the network unchanged: single numbers are encoded fast enough for each query."""
    return net

  def answer(self, on: SlotEvaluator, weights: Any, x: Sequence[Any]) -> list[Any]:
    net = weights
    layer = lambda held, kernel, bias: [
      on.plus(on.weighted_sum(zip(held, column)), shift)
      for column, shift in zip(kernel.T, bias)
    ]
    hidden = layer(x, net.kernel, net.bias)
    squares = [on.products([(unit, unit)]) for unit in hidden]
    return layer(squares, net.head, net.head_bias)


_KINDS = {"packed": _Packed, "pixels": _Pixels}


def _layout(name: str, num_inputs: int, hidden: int, classes: int) -> _Layout:
  validate.one_of(LAYOUTS, layout=name)
  return _KINDS[name](num_inputs, hidden, classes)


class ImageOwner:
  """The party with the images [n, d]. It alone can decrypt. The model's sizes are public."""

  def __init__(self, num_inputs: int, hidden: int, classes: int, *, layout: str = "packed"):
    self._layout = _layout(layout, num_inputs, hidden, classes)
    self._keys = SecretKeys(CHAIN, self._layout.rotations)
    self.images_each = self._layout.images_each

  @property
  def public(self) -> PublicKeys:
    """Returns the public keys, which the model's owner needs once."""
    return self._keys.public

  def encrypt(self, images: np.ndarray) -> list[bytes]:
    """Encrypts images [<= images_each, d], with numbers in [-1, 1], as one query."""
    if not 1 <= len(images) <= self.images_each:
      raise UserError(
        f"must be 1 to {self.images_each} at a time", field="images", value=len(images)
      )
    if np.shape(images)[1:] != (self._layout.d,):
      raise UserError(
        f"of shape {np.shape(images)}; must be [n, {self._layout.d}]", field="images"
      )
    # The condition is written so that NaN is refused, too.
    if np.asarray(images).dtype.kind not in "fiub" or not np.abs(images).max() <= 1:
      raise UserError(
        "must be in [-1, 1], for which no logit can wrap around", field="images"
      )
    return [self._keys.encrypt(slots) for slots in self._layout.pack(images)]

  def logits(self, answer: Sequence[bytes], num_images: int) -> np.ndarray:
    """Returns decrypted logits [num_images, k]. Keep them secret, and give others only the classes.

    Anyone who gets a raw decryption may learn the key.
    """
    validate.integer_in(1, self.images_each, num_images=num_images)
    if len(answer) != self._layout.answers:
      raise UserError(
        f"must be {self._layout.answers}",
        field="answer",
        value=Verbatim(f"{len(answer)} parts"),
      )
    return self._layout.unpack([self._keys.decrypt(part) for part in answer])[:num_images]


class ModelOwner:
  """The party with the network. It answers queries without reading them.

  Raises:
    UserError: weights that are NaN; so large that a logit of some image could wrap around; or so
      unlike in size that a logit's error may exceed 0.1 (`SquareNetwork.logit_error`).

  >>> rng = np.random.default_rng(0)
  >>> net = SquareNetwork(*(rng.normal(size=s) for s in [(6, 4), (4,), (4, 3), (3,)]))
  >>> client = ImageOwner(6, 4, 3)
  >>> x = rng.uniform(-1, 1, size=(2, 6))
  >>> answer = ModelOwner(net, client.public).answer(client.encrypt(x))
  >>> bool(np.abs(client.logits(answer, 2) - net.logits(x)).max() < 1e-3)
  True
  """

  def __init__(self, network: SquareNetwork, public: PublicKeys, *, layout: str = "packed"):
    d, h = network.kernel.shape
    k = network.head.shape[1]
    # The condition is written so that weights of NaN are refused, too.
    if not network.largest_logit <= _MOST:
      raise UserError(
        f"a logit may reach {network.largest_logit:.3g}; must be at most {_MOST:g}, "
        "or it wraps around; train with smaller steps or weights",
        field="network",
      )
    if not network.logit_error <= MOST_ERROR:
      raise UserError(
        f"a logit would be off by about {network.logit_error:.1g}; must be at most "
        f"{MOST_ERROR:g}; make the layers alike in size",
        field="network",
      )
    self._layout = _layout(layout, d, h, k)
    self._evaluator = SlotEvaluator(CHAIN, public)
    self._weights = self._layout.encode_weights(self._evaluator, network)

  def answer(self, question: Sequence[bytes]) -> list[bytes]:
    """Returns the answer to one query, in the layout's number of ciphertexts."""
    if len(question) != self._layout.questions:
      raise UserError(
        f"must be {self._layout.questions}; is it asked of a network of this "
        "size, in this layout?",
        field="question",
        value=Verbatim(f"{len(question)} ciphertexts"),
      )
    on = self._evaluator
    held = [on.load(cipher) for cipher in question]
    return [on.dump(part) for part in self._layout.answer(on, self._weights, held)]
