"""Two parties and the dealer as separate programs, connected by sockets.

Party 0 and the dealer listen. Party 0 connects to the dealer, party 1 to both. All sockets are
encrypted by TLS (`links`). The parties exchange shares and masked values. The dealer sends party 0
a key, party 1 a key and its bound parts, and receives names, shapes and public numbers.

On three machines, make one call on each:

    agreed = Agreed(token)
    serve_dealer("0.0.0.0:9001", agreed)
    with connect(0, agreed, listen="0.0.0.0:9000", dealer="dealer:9001") as party: ...
    with connect(1, agreed, peer="first:9000", dealer="dealer:9001") as party: ...

Each new connection is greeted at once, in a thread. It is closed unless the peer proves
within `_PATIENCE` seconds that it knows the token. If `_CROWD` greetings are open, the address with
the most open ones loses its oldest one. So silent strangers do not keep the three apart.

`run_processes` starts all three on this machine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import multiprocessing
import pickle
import queue
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np

from dpjax import validate

# A dealer's process deals only registered correlations: importing `comparison` registers "sign".
from dpjax.secure.mpc import comparison as _comparison  # noqa: F401
from dpjax.secure.mpc import links as link_lib
from dpjax.secure.mpc import ring64
from dpjax.secure.mpc.correlations import KEY_BYTES, arrays, correlated, fresh_key
from dpjax.secure.mpc.dealer import Dealer, Supply
from dpjax.secure.mpc.links import TIMEOUT, Link, PeerFailed, SocketLink
from dpjax.secure.mpc.party import Party
from dpjax.secure.mpc.session import GRACE, Ran, play, setting_of
from dpjax.validate import UserError

_RETRY = 0.05
_TURN = 0.02
# Seconds for the greeting of a new connection.
_PATIENCE = 10.0
# Largest number of greetings at once.
_CROWD = 64
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


def _address(at: str) -> tuple[str, int]:
  # `lobby` is imported here, since a party on this machine does not need it.
  from dpjax.secure.sums import lobby

  return lobby.address(at)


def _listen(at: str) -> socket.socket:
  try:
    return socket.create_server(_address(at))
  except OSError as error:
    raise UserError(
      f"cannot listen there ({error.strerror})", field="listen", value=at
    ) from error


class _Greetings:
  """Greets all new connections at once, each in its own thread, until `close` is called.

  Args:
    server: a listening socket.
    greet: function that returns a link over a connection, or raises PeerFailed for a stranger.
    until: value of `time.monotonic` at which `next` gives up.
  """

  def __init__(
    self, server: socket.socket, greet: Callable[[socket.socket], Any], until: float
  ):
    self._server = server
    self._greet = greet
    self._until = until
    self._waiting: dict[socket.socket, str] = {}  # connection -> host, oldest first
    self._done: queue.SimpleQueue[tuple[socket.socket, Any]] = queue.SimpleQueue()
    self._last = ""  # why the last stranger was let go

  def next(self, who: str) -> Any:
    """Returns the link of the next connection that was greeted.

    Raises:
      PeerFailed: `who` did not come in time.
      Exception: any other error of `greet`.
    """
    while True:
      while not self._done.empty():
        connection, greeted = self._done.get()
        self._waiting.pop(connection, None)
        if isinstance(greeted, PeerFailed):
          self._last = f"; somebody else did ({greeted})"
        elif isinstance(greeted, Exception):
          raise greeted
        else:
          return greeted
      left = self._until - time.monotonic()
      if left <= 0:
        raise PeerFailed(f"did not come in time{self._last}", field=who)
      # The wait is short, so that a greeting that is done is noticed soon.
      self._server.settimeout(min(left, _TURN))
      # `accept` also fails if the peer has left again.
      with contextlib.suppress(OSError):
        connection, (host, *_) = self._server.accept()
        self._begin(connection, host)

  def _begin(self, connection: socket.socket, host: str) -> None:
    if len(self._waiting) >= _CROWD:
      # The address with the most connections loses its oldest one, so that a crowd evicts only
      # itself.
      (crowded, _), *_ = Counter(self._waiting.values()).most_common(1)
      oldest = next(
        connection for connection, where in self._waiting.items() if where == crowded
      )
      self._let_go(oldest)
    self._waiting[connection] = host
    threading.Thread(target=self._run, args=(connection,), daemon=True).start()

  def _run(self, connection: socket.socket) -> None:
    try:
      greeted = self._greet(connection)
    except Exception as error:
      connection.close()
      greeted = error
    self._done.put((connection, greeted))

  def _let_go(self, connection: socket.socket) -> None:
    # This only wakes up the connection's own thread, which closes it. If it were closed here, its
    # file number could belong to another file when the thread closes it again.
    del self._waiting[connection]
    with contextlib.suppress(OSError):
      connection.shutdown(socket.SHUT_RDWR)

  def close(self) -> None:
    """Disconnects all peers that `next` has not returned."""
    for connection in [*self._waiting]:
      self._let_go(connection)
    while not self._done.empty():
      _, greeted = self._done.get()
      if not isinstance(greeted, Exception):
        greeted.close()


def _reach(at: tuple[str, int], who: str, until: float) -> socket.socket:
  while True:
    try:
      return socket.create_connection(at, timeout=max(until - time.monotonic(), 0.001))
    except OSError as error:
      if time.monotonic() + _RETRY > until:
        raise PeerFailed(f"nobody is at {at[0]}:{at[1]} ({error})", field=who) from error
    time.sleep(_RETRY)


# --- the dealer


def serve_dealer(listen: str, agreed: Agreed) -> None:
  """Deals to two parties until party 1 leaves, or sends a wrong request.

  Args:
    listen: "HOST:PORT".

  Raises:
    PeerFailed: the parties did not come in time.
  """
  with _listen(listen) as server:
    _serve(server, agreed)


def _serve(server: socket.socket, agreed: Agreed) -> None:
  dealer = Dealer(agreed.seed)
  until = time.monotonic() + agreed.timeout
  links: dict[int, SocketLink] = {}

  def greet(connection: socket.socket) -> SocketLink:
    number = _who(connection, min(_PATIENCE, agreed.timeout))
    return SocketLink(
      connection, me="dealer", peer=f"party {number}", token=agreed.token,
      timeout=agreed.timeout, patience=_PATIENCE,
    )  # fmt: skip

  with contextlib.ExitStack() as stack:
    with contextlib.closing(_Greetings(server, greet, until)) as greetings:
      while len(links) < 2:
        link = greetings.next(f"party {1 if 0 in links else 0}")
        stack.callback(link.close)
        number = int(link.peer.removeprefix("party "))
        if number in links:
          # The party connected twice; the first connection stays.
          link.close()
          continue
        links[number] = link
        link.send(dealer.keys[number])
    _deal(dealer, links[1])


def _who(connection: socket.socket, patience: float) -> int:
  """Returns the number, 0 or 1, that a party sends first. The keys of the link depend on it."""
  connection.settimeout(patience)
  try:
    said = connection.recv(1)
  except OSError:
    said = b""
  if said not in (b"0", b"1"):
    raise PeerFailed("says neither 0 nor 1; is it another program?", field="a party")
  return int(said)


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
    forms = [(part.shape, part.dtype) for part in correlated(name, arguments).bound]
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
    where = stack.enter_context(_listen(listen)) if listen else _address(peer)
    yield _meet(stack, number, agreed, _address(dealer), where)


def _meet(
  stack: contextlib.ExitStack,
  number: int,
  agreed: Agreed,
  dealer: tuple[str, int],
  peer: socket.socket | tuple[str, int],
) -> Party:
  """Returns a connected party. `peer` is its listening socket (party 0), or party 0's address."""
  until = time.monotonic() + agreed.timeout
  me = f"party {number}"
  other = f"party {1 - number}"
  common = {"me": me, "token": agreed.token, "timeout": agreed.timeout}
  to_dealer = stack.enter_context(_reach(dealer, "dealer", until))
  # The number tells the dealer whose key to send.
  to_dealer.sendall(str(number).encode())
  dealer_link = SocketLink(to_dealer, peer="dealer", **common)
  stack.callback(dealer_link.close)
  supply = _supply(number, dealer_link)

  def greet(connection: socket.socket, patience: float | None = _PATIENCE) -> SocketLink:
    return SocketLink(
      connection, peer=other, topic=agreed.terms, patience=patience, **common
    )

  if isinstance(peer, socket.socket):
    # Anybody may connect here, so each caller gets little time.
    with contextlib.closing(_Greetings(peer, greet, until)) as greetings:
      link = greetings.next(other)
  else:
    link = greet(_reach(peer, other, until), None)
  stack.callback(link.close)
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
    dealer = _started(stack, _dealer_main, agreed)
    first, second = (
      _started(stack, _party_main, number, agreed, program, inputs)
      for number, inputs in enumerate((inputs0, inputs1))
    )
    at, peer, _ = (_heard(pipe, _START) for pipe in (dealer, first, second))
    for pipe, sent in ((dealer, None), (first, (at, None)), (second, (at, peer))):
      pipe.send(sent)
    (out0, spent0), (out1, spent1) = _outcomes([first, second])
  where = setting_of(seed, "two parties and the dealer, a process each, on one machine")
  return Ran((out0, out1), (spent0, spent1), where)


def _started(
  stack: contextlib.ExitStack, main: Callable[..., None], *arguments: Any
) -> Any:  # a Connection; Windows has another class
  context = multiprocessing.get_context("spawn")
  ours, theirs = context.Pipe()
  process = context.Process(target=main, args=(theirs, *arguments), daemon=True)
  process.start()
  theirs.close()
  stack.callback(ours.close)
  # When the stack closes, all outcomes have been read, or there was an error: the process may end.
  stack.callback(_ended, process)
  return ours


def _ended(process: Any) -> None:
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
        party = _meet(stack, number, agreed, dealer, peer or server)
        pipe.send((None, (play(program, party, inputs), party.spent)))
    except UserError as error:
      pipe.send((type(error), str(error)))
    # The program's author also needs the traceback, so this error is reported and raised.
    except Exception as error:
      pipe.send((UserError, f"party {number}: {type(error).__name__}: {error}"))
      raise
