"""Two parties and the dealer as separate programs, connected by sockets.

Party 0 and the dealer listen. Party 0 connects to the dealer, party 1 to both. All sockets are
encrypted by TLS (`links`). The parties exchange shares and masked values. The dealer sends party 0
a key, party 1 a key and its bound parts, and receives names, shapes and public numbers.

On three machines, make one call on each:

    agreed = Agreed(token)
    serve_dealer("0.0.0.0:9001", agreed)
    with connect(0, agreed, listen="0.0.0.0:9000", dealer="dealer:9001") as party: ...
    with connect(1, agreed, peer="first:9000", dealer="dealer:9001") as party: ...

They meet as the programs of a secure sum do (`meeting`): who does not know the token is
disconnected, and silent strangers do not keep the three apart.

`run_processes` starts all three on this machine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import multiprocessing
import pickle
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np

from dpjax import validate
from dpjax.secure import meeting
from dpjax.secure.meeting import Address

# A dealer's process deals only registered correlations: importing `comparison` registers "sign".
from dpjax.secure.mpc import comparison as _comparison  # noqa: F401
from dpjax.secure.mpc import links as link_lib
from dpjax.secure.mpc import ring64
from dpjax.secure.mpc.correlations import KEY_BYTES, arrays, correlation_named, fresh_key
from dpjax.secure.mpc.dealer import Dealer, Supply
from dpjax.secure.mpc.links import TIMEOUT, Link, PeerFailed, SocketLink
from dpjax.secure.mpc.party import Party
from dpjax.secure.mpc.session import GRACE, Ran, play, setting_of
from dpjax.secure.sums import primitives
from dpjax.validate import UserError

# Seconds for a process of this machine to import everything.
_START = 120.0


@dataclasses.dataclass(frozen=True)
class Agreed:
  """Facts on which both parties and the dealer agree in advance, over another channel."""

  token: bytes  # >= 16 bytes; who lacks it cannot take part
  topic: str = ""  # names the program and its public arguments; another topic is refused
  frac_bits: int = ring64.FRAC_BITS
  truncation: str = "masked"
  timeout: float = TIMEOUT  # seconds to wait for the others, and longest silence of each
  seed: int | None = None  # a number makes a SIMULATION, which anybody can repeat

  def __post_init__(self) -> None:
    link_lib.check(self.token, self.timeout)

  @property
  def terms(self) -> str:
    """Text that both parties must have in common, since the keys of their link depend on it."""
    return f"{self.topic} f={self.frac_bits} {self.truncation}"

  def secret(self, topic: str = "") -> bytes:
    """Returns what programs of one topic prove to know at their meeting, [32]."""
    return primitives.derive(self.token, f"dpjax mpc meeting {topic}".encode())


@contextlib.contextmanager
def _meeting(who: str) -> Iterator[None]:
  """Context whose errors are about the program that is met. Parties are clients of a meeting."""
  try:
    yield
  except UserError as error:
    if error.field == "client":
      raise PeerFailed(error.must, field="party", value=error.value) from error
    what = "terms " if error.field == "terms" else ""
    raise PeerFailed(f"{what}{error.must}", field=who) from error


# --- the dealer


def serve_dealer(listen: str, agreed: Agreed) -> None:
  """Deals to two parties until party 1 leaves, or sends a wrong request.

  Args:
    listen: "HOST:PORT".

  Raises:
    PeerFailed: the parties did not come in time.
  """
  with meeting.listen(meeting.address(listen, "listen"), "listen") as server:
    _serve(server, agreed)


def _serve(server: socket.socket, agreed: Agreed) -> None:
  dealer = Dealer(agreed.seed)
  with contextlib.ExitStack() as stack:
    with _meeting("a party"):
      met = meeting.host(server, (0, 1), agreed.secret(), agreed.timeout, fewest=2)
    for connection in met.values():
      stack.callback(connection.close)
    links = []
    for number in (0, 1):
      names = {"me": "dealer", "peer": f"party {number}"}
      link = SocketLink(met[number], token=agreed.token, timeout=agreed.timeout, **names)
      stack.callback(link.close)
      link.send(dealer.keys[number])
      links.append(link)
    _deal(dealer, links[1])


def _deal(dealer: Dealer, link: Link) -> None:
  """Answers requests until the party leaves, or sends a wrong request."""
  asked_for = ValueError, TypeError, ArithmeticError, LookupError, MemoryError
  with contextlib.suppress(PeerFailed, *asked_for):
    while True:
      number, name, arguments = json.loads(link.receive(None))
      bound = dealer.bound(int(number), name, arguments)
      link.send(b"".join(part.tobytes() for part in bound))


def _supply(number: int, link: Link) -> Supply:
  key = link.receive(KEY_BYTES)

  def ask(index: int, name: str, arguments: list) -> list[np.ndarray]:
    forms = [(part.shape, part.dtype) for part in correlation_named(name, arguments).bound]
    link.send(json.dumps([index, name, arguments]).encode())
    length = sum(math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in forms)
    return arrays(link.receive(length), forms)

  return Supply(key, ask if number else None)


# --- a party


@contextlib.contextmanager
def connect(
  number: int,
  agreed: Agreed,
  *,
  dealer: str,
  listen: str = "",
  peer: str = "",
) -> Iterator[Party]:
  """Context that connects one party to the other one and to the dealer.

  Args:
    number: 0, which listens at `listen`, or 1, which connects to party 0 at `peer`.
    dealer: "HOST:PORT" of the dealer.

  Raises:
    PeerFailed: another program is missing, wrong, or silent for `timeout` seconds.
  """
  validate.integer_in(0, 1, number=number)
  if bool(listen) == bool(number) or bool(peer) != bool(number):
    raise UserError(
      "must be 0 with listen=, or 1 with peer=, and not the other's",
      field="number",
      value=number,
    )
  with contextlib.ExitStack() as stack:
    where = meeting.address(listen or peer, "listen" if listen else "peer")
    to_dealer = meeting.address(dealer, "dealer")
    door = stack.enter_context(meeting.listen(where, "listen")) if listen else where
    yield _meet(stack, number, agreed, to_dealer, door)


def _meet(
  stack: contextlib.ExitStack,
  number: int,
  agreed: Agreed,
  dealer: Address,
  peer: socket.socket | Address,
) -> Party:
  """Returns a connected party. `peer` is its listening socket (party 0), or party 0's address."""
  until = time.monotonic() + agreed.timeout
  me = f"party {number}"
  other = f"party {1 - number}"
  common = {"me": me, "token": agreed.token, "timeout": agreed.timeout}
  secret = agreed.secret(agreed.terms)
  # The parties meet first, so that strangers who wait where party 0 listens are heard at once.
  with _meeting(other):
    if isinstance(peer, socket.socket):
      (connection,) = meeting.host(peer, (1,), secret, agreed.timeout, fewest=1).values()
    else:
      connection = meeting.join(peer, number, secret, agreed.timeout)
  link = SocketLink(connection, peer=other, topic=agreed.terms, **common)
  stack.callback(link.close)
  with _meeting("dealer"):
    left = max(until - time.monotonic(), 0.0)
    to_dealer = meeting.join(dealer, number, agreed.secret(), left)
  dealer_link = SocketLink(to_dealer, peer="dealer", **common)
  stack.callback(dealer_link.close)
  supply = _supply(number, dealer_link)
  settings = {"frac_bits": agreed.frac_bits, "truncation": agreed.truncation}
  key = fresh_key(agreed.seed, me)
  return Party(number, link, supply, key, **settings)


# --- all three on this machine


def run_processes(
  program: Callable[..., Any],
  inputs0: Sequence[Any] = (),
  inputs1: Sequence[Any] = (),
  *,
  seed: int | None = None,
  frac_bits: int = ring64.FRAC_BITS,
  truncation: str = "masked",
  timeout: float = TIMEOUT,
) -> Ran:
  """Runs a program as `session.run` does, but with a process for each party and for the dealer.

  This process gives each party its inputs and takes its outputs. The parties exchange only
  what the program sends, over a socket of this machine.

  Args:
    program: function of a module that the processes import, or a `functools.partial` of one. A
      script must call `run_processes` under `if __name__ == "__main__"`.

  Raises:
    UserError: the first error of a party; PeerFailed only if there is no other error. All processes
      are ended.
  """
  try:
    # Processes get `program` by pickle, so what pickle cannot write is refused.
    pickle.dumps(program)
  except (pickle.PicklingError, AttributeError, TypeError) as error:
    raise UserError(
      "must be a function of a module, that other processes can import",
      field="program",
      value=program,
    ) from error
  agreed = Agreed(secrets.token_bytes(32), "", frac_bits, truncation, timeout, seed)
  with contextlib.ExitStack() as stack:
    dealer = _start(stack, _dealer_main, agreed)
    first, second = (
      _start(stack, _party_main, number, agreed, program, inputs)
      for number, inputs in enumerate((inputs0, inputs1))
    )
    at, peer, _ = (_heard(pipe, _START) for pipe in (dealer, first, second))
    for pipe, sent in ((dealer, None), (first, (at, None)), (second, (at, peer))):
      pipe.send(sent)
    (out0, spent0), (out1, spent1) = _outcomes([first, second])
  where = setting_of(seed, "two parties and the dealer, a process each, on one machine")
  return Ran((out0, out1), (spent0, spent1), where)


def _start(
  stack: contextlib.ExitStack, main: Callable[..., None], *arguments: Any
) -> Any:  # a Connection; Windows has another class
  context = multiprocessing.get_context("spawn")
  ours, theirs = context.Pipe()
  process = context.Process(target=main, args=(theirs, *arguments), daemon=True)
  process.start()
  theirs.close()
  stack.callback(ours.close)
  # When the stack closes, all outcomes have been read, or there was an error: the process may end.
  stack.callback(_end, process)
  return ours


def _end(process: Any) -> None:
  """Ends a process, even one that is stopped or ignores signals."""
  process.terminate()
  process.join(GRACE)
  process.kill()
  process.join()


def _heard(pipe: Connection, timeout: float | None = None) -> Any:
  """Returns the report of a child process; raises its error."""
  if timeout is not None and not pipe.poll(timeout):
    raise PeerFailed(f"a process did not start in {timeout:g} seconds")
  try:
    fault, value = pipe.recv()
  except EOFError:
    raise PeerFailed("a process has died") from None
  if fault:
    raise fault(value)
  return value


def _outcomes(pipes: Sequence[Connection]) -> list[Any]:
  """Returns (outputs, `Spent`) of each party.

  If a party failed, raises its error; PeerFailed only if there is no other error.
  """
  outcomes = {}
  faults = []
  left = list(pipes)
  while left:
    # After a first error, the other party gets a moment to report its own error.
    ready = wait(left, timeout=GRACE if faults else None)
    if not ready:
      break
    pipe: Any = ready[0]
    left.remove(pipe)
    try:
      outcomes[pipe] = _heard(pipe)
    except UserError as error:
      faults.append(error)
  if faults:
    raise min(faults, key=lambda error: isinstance(error, PeerFailed))
  return [outcomes[pipe] for pipe in pipes]


def _dealer_main(pipe: Connection, agreed: Agreed) -> None:
  with socket.create_server(("127.0.0.1", 0)) as server:
    pipe.send((None, server.getsockname()))
    # Waits until all parties are ready.
    pipe.recv()
    # The error is not raised: the parties notice that the dealer has ended, and report it.
    with contextlib.suppress(UserError):
      _serve(server, agreed)


def _party_main(
  pipe: Connection,
  number: int,
  agreed: Agreed,
  program: Callable[..., Any],
  inputs: Sequence[Any],
) -> None:
  with socket.create_server(("127.0.0.1", 0)) as server:
    pipe.send((None, server.getsockname()))
    dealer, peer = pipe.recv()
    try:
      with contextlib.ExitStack() as stack:
        door = Address(*peer) if peer else server
        party = _meet(stack, number, agreed, Address(*dealer), door)
        pipe.send((None, (play(program, party, inputs), party.spent)))
    except UserError as error:
      pipe.send((type(error), str(error)))
    # The program's author also needs the traceback, so this error is reported and raised.
    except Exception as error:
      pipe.send((UserError, f"party {number}: {type(error).__name__}: {error}"))
      raise
