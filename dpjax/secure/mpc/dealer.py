"""The trusted dealer: a third party that makes correlated randomness and sees no data.

TRUSTED: the dealer must not collude with a party. Anyone who knows the dealer's keys and hears what
the parties open can read everything. SecureML (section IV) makes the same triples without a dealer,
by oblivious transfer or homomorphic encryption. That takes hours for its larger trainings.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from dpjax.secure.mpc.correlations import Unique, bind, correlation_named, expand, fresh_key
from dpjax.validate import UserError

# Function of (number, name, arguments) of a correlation that returns party 1's bound parts.
Ask = Callable[[int, str, list], list[np.ndarray]]


class Dealt(Unique):
  """A party's shares of a correlation, for one use."""

  def __init__(self, number: int, name: str, parts: list[np.ndarray]):
    self.number = number
    self.name = name
    self._parts = parts

  def use(self) -> list[np.ndarray]:
    """Returns the parts, once: a second use of the masks would reveal how the hidden values differ.

    Raises UserError for a second call.
    """
    if not self._parts:
      raise UserError(
        f"was used already ({self.name}); each masks one product, two openings under one mask "
        "tell the difference of what they hide",
        field="correlation",
        value=self.number,
      )
    parts = self._parts
    self._parts = []
    return parts


class Dealer(Unique):
  """Makes correlated randomness for two parties, who use it in the same order.

  Args:
    seed: None draws the keys from the operating system. A number makes a SIMULATION that
      anybody can repeat, and hides nothing from anybody.
  """

  def __init__(self, seed: int | None = None):
    self.keys = tuple(fresh_key(seed, f"dealer {party}") for party in (0, 1))
    self.supplied = False
    self._next = 0

  def bound(self, number: int, name: str, arguments: list) -> list[np.ndarray]:
    """Returns party 1's shares of a correlation's bound parts, which it cannot expand by itself.

    Raises UserError for a number that was dealt or skipped already.
    """
    if number < self._next:
      raise UserError(
        "was dealt already; each is dealt once", field="correlation", value=number
      )
    self._next = number + 1
    return bind(correlation_named(name, arguments), self.keys, number)


class Supply(Unique):
  """A party's connection to the dealer.

  Args:
    key: key that the party shares with the dealer.
    ask: function that gets the bound parts of party 1 from the dealer; None in party 0, which
      expands all parts.
  """

  def __init__(self, key: bytes, ask: Ask | None):
    self._key = key
    self._ask = ask
    self._lock = threading.Lock()
    self.dealt: dict[str, int] = {}  # number of correlations by name
    self.bytes_received = 0

  def deal(self, name: str, *arguments: Any) -> Dealt:
    """Returns this party's shares of the next correlation. Several threads may call it."""
    # If two threads got one number for their correlations, they would use the same masks.
    with self._lock:
      return self._deal(name, arguments)

  def _deal(self, name: str, arguments: tuple) -> Dealt:
    # Both parties count all correlations, so that each has the same number in both.
    number = sum(self.dealt.values())
    wanted = correlation_named(name, arguments)
    self.dealt[name] = self.dealt.get(name, 0) + 1
    if self._ask is None:
      return Dealt(number, name, expand(self._key, number, (*wanted.free, *wanted.bound)))
    bound = self._ask(number, name, list(arguments))
    self.bytes_received += sum(part.nbytes for part in bound)
    return Dealt(number, name, [*expand(self._key, number, wanted.free), *bound])


def supplies(dealer: Dealer) -> tuple[Supply, Supply]:
  """Returns the supplies of both parties, for a dealer in this process.

  Raises UserError if this dealer has given its supplies before.
  """
  if dealer.supplied:
    raise UserError("has its two parties; others would get the same masks", field="dealer")
  dealer.supplied = True
  return Supply(dealer.keys[0], None), Supply(dealer.keys[1], dealer.bound)
