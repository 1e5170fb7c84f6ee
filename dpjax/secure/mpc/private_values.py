"""Turns inputs of a party or of a client into shares, and shares into outputs.

>>> def scores(party, x, w):  # x: [n, d] of party 0; w: [d, 1] of party 1
...   x = share(party, x, owner=0)
...   w = share(party, w, owner=1)
...   return reveal(party, products.matmul(party, x, w), to=0)
>>> shape = jax.ShapeDtypeStruct  # the other's input: its shape is all that one knows
>>> x, w = np.array([[1.0, 2.0]]), np.array([[0.5], [-3.0]])
>>> from dpjax.secure.mpc import products, session
>>> ran = session.run(scores, (x, shape((2, 1), float)), (shape((1, 2), float), w))
>>> np.round(ran.outputs[0], 4), ran.outputs[1]
(array([[-5.5]]), None)
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from dpjax import validate
from dpjax.secure.mpc import ring64
from dpjax.secure.mpc.correlations import Part, arrays, expand, fresh_key
from dpjax.secure.mpc.party import Party, words
from dpjax.validate import UserError

Tree = Any  # a pytree of arrays


def share(party: Party, tree: Tree, *, owner: int) -> Tree:
  """Returns this party's shares of values that party `owner` holds.

  Hides the values from the other party, which receives them under a ChaCha20 keystream. Shapes
  are public.

  Args:
    tree: in the owner, a tree of real numbers, |x| < `ring64.largest(frac_bits)`. In the other
      party, a tree of these shapes, as `jax.ShapeDtypeStruct`; values in it are not read.
    owner: 0 or 1.

  Returns:
    The same tree with [...] uint64 shares.
  """
  validate.integer_in(0, 1, owner=owner)
  leaves, structure = jax.tree.flatten(tree)
  if party.number == owner:
    encoded = [ring64.encode(leaf, party.frac_bits) for leaf in leaves]
    # The mask is this party's share, the difference is the other party's. Each one looks uniform.
    mine = [party.mask(word.shape) for word in encoded]
    party.link.send(b"".join((word - mask).tobytes() for word, mask in zip(encoded, mine)))
  else:
    shapes = (getattr(leaf, "shape", None) for leaf in leaves)
    mine = _receive(
      party, [np.shape(leaf) if of is None else of for leaf, of in zip(leaves, shapes)]
    )
  return jax.tree.unflatten(structure, mine)


def reveal(
  party: Party, tree: Tree, *, to: int | None = None, frac_bits: int | None = None
) -> Tree:
  """Reveals the values of shares to one party or to both.

  Args:
    tree: [...] uint64 shares.
    to: the party that learns the values, 0 or 1; None: both.
    frac_bits: fraction bits of the values; None: the party's. 0 for bits and indices.

  Returns:
    The same tree of float64 values; None for a party that does not learn them.
  """
  leaves, structure = jax.tree.flatten(tree)
  words(leaves)
  if to is None:
    opened = party.open(*leaves)
  elif party.number == to:
    theirs = _receive(party, [leaf.shape for leaf in leaves])
    opened = [np.add(mine, other) for mine, other in zip(leaves, theirs)]
  else:
    # This party only sends, and learns nothing.
    validate.integer_in(0, 1, to=to)
    party.link.send(b"".join(leaf.tobytes() for leaf in leaves))
    return None
  bits = party.frac_bits if frac_bits is None else frac_bits
  return jax.tree.unflatten(structure, [ring64.decode(word, bits) for word in opened])


def _receive(party: Party, shapes: list[tuple[int, ...]]) -> list[np.ndarray]:
  data = party.link.receive(8 * sum(int(np.prod(shape)) for shape in shapes))
  return arrays(data, [(shape, np.uint64) for shape in shapes])


def split(
  tree: Tree, *, frac_bits: int = ring64.FRAC_BITS, seed: int | None = None
) -> tuple[Tree, Tree]:
  """Splits a client's values into shares for two servers, neither of which learns anything
  about them.

  Args:
    tree: tree of real numbers, |x| < `ring64.largest(frac_bits)`.
    seed: None masks with the operating system's entropy; a number makes a SIMULATION, whose
      masks anybody can repeat.

  Returns:
    (the tree of party 0, the tree of party 1), [...] uint64 each.

  >>> zero, one = split({"w": np.array([1.0, -2.0])})
  >>> join(zero, one)
  {'w': array([ 1., -2.])}
  """
  leaves, structure = jax.tree.flatten(tree)
  encoded = [ring64.encode(leaf, frac_bits) for leaf in leaves]
  masks = expand(fresh_key(seed, "split"), 0, [Part(word.shape) for word in encoded])
  masked = [np.subtract(word, mask) for word, mask in zip(encoded, masks)]
  return jax.tree.unflatten(structure, masks), jax.tree.unflatten(structure, masked)


def join(first: Tree, second: Tree, *, frac_bits: int = ring64.FRAC_BITS) -> Tree:
  """Adds both parties' shares for a client. Returns the float64 values that the sum represents."""
  first_leaves, second_leaves = (jax.tree.leaves(tree) for tree in (first, second))
  words([*first_leaves, *second_leaves])
  if [leaf.shape for leaf in first_leaves] != [leaf.shape for leaf in second_leaves]:
    raise UserError("the shares of both parties must have the same shapes", field="join")
  values = [
    ring64.decode(np.add(*pair), frac_bits) for pair in zip(first_leaves, second_leaves)
  ]
  return jax.tree.unflatten(jax.tree.structure(first), values)
