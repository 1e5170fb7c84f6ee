"""Runs both parties and the dealer in one process: each party in a thread, linked by queues.

The same programs also run in separate processes (`three_programs`), with the same messages. Whoever
runs this one process holds everything.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from dpjax.secure.mpc import ring64
from dpjax.secure.mpc.correlations import fresh_key
from dpjax.secure.mpc.dealer import Dealer, supplies
from dpjax.secure.mpc.links import TIMEOUT, PeerFailed, queue_links
from dpjax.secure.mpc.party import Party, Spent

# Seconds between two checks whether a party has failed.
_LOOK = 0.05
# Seconds for the other party to report its own error, after one party has failed.
GRACE = 2.0


class Ran(NamedTuple):
  """Outputs of a program, its cost, and how the parties were separated."""

  outputs: tuple[Any, Any]  # of party 0 and party 1
  spent: tuple[Spent, Spent]
  setting: str  # how the parties were separated; a report says it beside each number

  @property
  def cost(self) -> tuple[int, int, int]:
    """Tuple of bytes between the parties, bytes from the dealer, and rounds."""
    sent = sum(party.bytes_sent for party in self.spent)
    dealt = sum(party.bytes_dealt for party in self.spent)
    return sent, dealt, self.spent[0].rounds


def run(
  program: Callable[..., Any],
  inputs0: Sequence[Any] = (),
  inputs1: Sequence[Any] = (),
  *,
  seed: int | None = None,
  frac_bits: int = ring64.FRAC_BITS,
  truncation: str = "masked",
  timeout: float = TIMEOUT,
) -> Ran:
  """Runs program(party, *inputs) for both parties, and returns outputs and costs.

  Args:
    program: function `program(party, *inputs)`, as described in `party`.
    inputs0, inputs1: arguments of party 0 and of party 1. They reach the other party only by the
      program's messages.
    seed: None: all randomness from the operating system. A number makes a SIMULATION that
      repeats bit for bit, and hides nothing from anyone who knows the number.
    frac_bits: f, the fraction bits of the fixed point.
    truncation: "masked" or "local", see `products.truncate`.
    timeout: longest time in seconds that a party may be silent.

  Raises:
    Exception: the first error of either party. A lost peer is reported only if nothing else failed.

  >>> from dpjax.secure import mpc
  >>> (x0, x1), (y0, y1) = (mpc.private_values.split(np.array([[v]])) for v in (1.5, -2.0))
  >>> ran = run(mpc.matmul, (x0, y0), (x1, y1))
  >>> mpc.private_values.join(*ran.outputs).round(3), ran.spent[0].bytes_sent, ran.spent[0].rounds
  (array([[-3.]]), 24, 2)
  >>> ran.setting
  'both parties and the dealer in one process, which holds everything'
  """
  ends = queue_links(timeout)
  dealt = supplies(Dealer(seed))
  settings = {"frac_bits": frac_bits, "truncation": truncation}
  parties = [
    Party(
      number, ends[number], dealt[number], fresh_key(seed, f"party {number}"), **settings
    )
    for number in (0, 1)
  ]
  outputs: list[Any] = [None, None]
  faults: list[BaseException] = []

  def act(party: Party, inputs: Sequence[Any]) -> None:
    try:
      outputs[party.number] = play(program, party, inputs)
    except BaseException as error:
      faults.append(error)
    finally:
      # The other party learns that this one is gone, and does not wait until the timeout.
      party.link.close()

  both = [
    threading.Thread(target=act, args=each, daemon=True)
    for each in zip(parties, (inputs0, inputs1))
  ]
  for thread in both:
    thread.start()
  while any(thread.is_alive() for thread in both) and not faults:
    for thread in both:
      thread.join(_LOOK)
  if faults:
    # Threads get GRACE seconds to report; a thread that hangs is left behind.
    for thread in both:
      thread.join(GRACE)
    # A lost peer is only a consequence of the peer's own error.
    raise min(faults, key=lambda error: isinstance(error, PeerFailed))
  where = setting_of(
    seed, "both parties and the dealer in one process, which holds everything"
  )
  return Ran((outputs[0], outputs[1]), (parties[0].spent, parties[1].spent), where)


def setting_of(seed: int | None, where: str) -> str:
  """Returns a text on the setting of a run. With a seed the run is a simulation without secrecy."""
  return where if seed is None else f"simulation: masks follow from seed {seed}; {where}"


def play(program: Callable[..., Any], party: Party, inputs: Sequence[Any]) -> Any:
  """Runs a program for one party, and returns its outputs.

  Shares wrap around by design, so NumPy's warnings of overflow are switched off.
  """
  with np.errstate(over="ignore"):
    return program(party, *inputs)
