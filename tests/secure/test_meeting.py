"""Parties find each other and end with one line, whoever else knocks or dies."""

import json
import socket
import struct
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpjax.secure import meeting
from dpjax.validate import UserError, Verbatim
from tests.federated import programs

_SOON = 60  # seconds; nothing here takes one, unless the machine is loaded


def _meet(coordinator, count, who, secret, timeout):
  """The connections of one party, by id. The clients are 1, 2, ...; the server is 0."""
  at = meeting.address(coordinator)
  if who:
    return {0: meeting.join(at, who, secret, timeout)}
  with meeting.listen(at) as server:
    return meeting.host(server, range(1, count + 1), secret, timeout, fewest=count)


class _Calls:
  """`_meet` with these arguments, each in a thread."""

  def __init__(self, arguments):
    self.ended = [None] * len(arguments)
    self._threads = [
      threading.Thread(target=self._one, args=pair, daemon=True)
      for pair in enumerate(arguments)
    ]
    for thread in self._threads:
      thread.start()

  def _one(self, place, options):
    try:
      self.ended[place] = _meet(**options)
    except UserError as error:
      self.ended[place] = str(error)

  def wait(self):
    """What each ended in; None where it did not."""
    for thread in self._threads:
      thread.join(_SOON)
    return self.ended


def _meet_all(arguments):
  return _Calls(arguments).wait()


def _options(port, index, **changes):
  options = dict(coordinator=f"127.0.0.1:{port}", count=1, who=index, secret=b"a",
                 timeout=50.0)  # fmt: skip
  return options | changes


def _word(connection):
  return meeting.read(connection, 16, time.monotonic() + _SOON)


def _told(connection):
  """What a client that is refused reads."""
  until = time.monotonic() + _SOON
  (length,) = meeting.FRAME.unpack(meeting.read(connection, meeting.FRAME.size, until))
  return UserError.of_facts(json.loads(meeting.read(connection, length, until)))


def _close(found):
  assert all(isinstance(one, dict) for one in found), found
  for connections in found:
    for connection in connections.values():
      connection.close()


def _knock(port):
  """A connection to the server, as soon as it listens."""
  for _ in range(1000):
    try:
      return socket.create_connection(("127.0.0.1", port), timeout=_SOON)
    except OSError:
      time.sleep(0.01)
  raise AssertionError("nobody listens")


# --- strangers


_NONSENSE = {
  "http": b"GET / HTTP/1.1\r\n\r\n\n",
  "a huge length": b"\xff\xff\xff\x7f" + b"x" * 100 + b"\n",
  "endless": b"\0" * 9000,
  "no object": b"[1, 2]\n",
  "no text": b"\xff\xfe\n",
  "deep": b"[" * 4000 + b"\n",
  "no secret": bytes(36),
  "half": b"\1\0\0\0",
  "nothing": b"",
}


@pytest.mark.parametrize("name", _NONSENSE)
@pytest.mark.parametrize("ends", ["stays", "closes", "resets"])
def test_a_stranger_is_let_go(name, ends):
  port = programs.free_port()
  calls = _Calls([_options(port, 0)])
  stranger = _knock(port)
  stranger.sendall(_NONSENSE[name])
  if ends == "resets":
    stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
  if ends != "stays":
    stranger.close()
  second = _Calls([_options(port, 1)])
  _close([*calls.wait(), *second.wait()])
  stranger.close()


@settings(max_examples=40)
@given(st.binary(max_size=200) | st.binary(min_size=36, max_size=36))
def test_no_hello_but_the_right_one_is_one(data):
  """Whatever is said without a proof for the word that was given: a stranger, and no traceback."""
  ours, theirs = socket.socketpair()
  server = socket.create_server(("127.0.0.1", 0))
  with ours, theirs, server:
    met = meeting._Meeting(server, (1, 2), b"a")
    caller = meeting._Caller(ours, ("",))
    met._waiting.append(caller)
    theirs.sendall(data)
    theirs.shutdown(socket.SHUT_WR)
    while caller in met._waiting:
      met._serve(caller)
    assert not met.present
    # Nothing is kept of ids that are no client's, or memory would grow with strangers.
    assert met._refused.keys() <= {1, 2}


@pytest.mark.slow
def test_a_flood_from_elsewhere_does_not_push_out_a_slow_peer():
  """It has connected, and says who it is only after 200 others have come."""
  port = programs.free_port()
  calls = _Calls([_options(port, 0)])
  _knock(port).close()  # it listens
  slow = socket.create_connection(
    ("127.0.0.1", port), timeout=_SOON, source_address=("127.0.0.2", 0)
  )
  word = _word(slow)
  flood = [_knock(port) for _ in range(200)]
  time.sleep(0.5)
  slow.sendall(meeting._hello(b"a", word, 1))
  _close(calls.wait())
  for one in (*flood, slow):
    one.close()


def test_a_peer_that_was_let_go_comes_again(monkeypatch):
  """As by a flood from its own machine: its first connections end without an answer."""
  port, dismissed = programs.free_port(), []
  admit = meeting._Meeting._admit

  def crowded(self, caller):
    if len(dismissed) < 3:
      dismissed.append(caller)
      return self._dismiss(caller)
    return admit(self, caller)

  monkeypatch.setattr(meeting._Meeting, "_admit", crowded)
  _close(_meet_all([_options(port, 0), _options(port, 1)]))
  assert len(dismissed) == 3


def test_more_honest_peers_than_a_crowd_are_not_turned_away(monkeypatch):
  monkeypatch.setattr(meeting, "_CROWD", 2)
  port = programs.free_port()
  _close(_meet_all([_options(port, index, count=8) for index in range(9)]))


def test_a_hundred_silent_strangers_keep_nobody_waiting():
  port = programs.free_port()
  calls = _Calls([_options(port, 0, count=2)])
  strangers = [_knock(port) for _ in range(100)]
  others = _Calls([_options(port, index, count=2) for index in (1, 2)])
  _close([*calls.wait(), *others.wait()])
  for stranger in strangers:
    stranger.close()


class _Trickle(threading.Thread):
  """Sends a byte every now and then, for as long as somebody takes them."""

  def __init__(self, connection):
    super().__init__(daemon=True)
    self._connection, self.done = connection, threading.Event()
    self.start()

  def run(self):
    while not self.done.wait(0.05):
      try:
        self._connection.sendall(b" ")
      except OSError:
        return


@pytest.mark.slow
def test_a_stranger_who_trickles_does_not_hold_the_meeting_past_its_limit():
  port = programs.free_port()
  calls = _Calls([_options(port, 0, timeout=1.0)])
  with _knock(port) as stranger:
    trickle = _Trickle(stranger)
    (line,) = calls.wait()
    trickle.done.set()
    trickle.join(_SOON)
  assert line == "client=1: did not come in time; see connect_timeout"


@pytest.mark.cases(long=["greets"], slow=...)
@pytest.mark.parametrize("says", ["nothing", "trickle", "garbage", "greets"])
def test_a_server_that_says_nothing_of_use_is_not_waited_for_for_ever(says, monkeypatch):
  monkeypatch.setattr(meeting, "_PATIENCE", 0.5)
  with socket.create_server(("127.0.0.1", 0)) as server:
    port = server.getsockname()[1]
    calls = _Calls([_options(port, 1, timeout=1.0)])
    connection, _ = server.accept()
    if says == "greets":
      connection.sendall(bytes(16))
    if says == "garbage":
      connection.sendall(b"\x16\x03\x01\n")
    trickle = _Trickle(connection) if says == "trickle" else None
    (line,) = calls.wait()
    if trickle:
      trickle.done.set()
      trickle.join(_SOON)
    connection.close()
  assert f"coordinator=127.0.0.1:{port}: no answer from a server there" in line
  assert "connect_timeout" in line and "\n" not in line


@pytest.mark.slow
def test_a_hello_that_was_overheard_is_of_no_use():
  """Recorded from a meeting, said again at the next: a stranger, before or after."""
  with socket.create_server(("127.0.0.1", 0)) as server:
    calls = _Calls([_options(server.getsockname()[1], 1, timeout=1.0)])
    connection, _ = server.accept()
    connection.sendall(bytes(16))
    overheard = connection.recv(4096)
    connection.close()
  calls.wait()
  assert overheard[:4] == b"\1\0\0\0"
  port = programs.free_port()
  calls = _Calls([_options(port, 0)])
  with _knock(port) as replay:
    replay.sendall(overheard)
    second = _Calls([_options(port, 1)])
    _close([*calls.wait(), *second.wait()])


def _claim(port, client, proof):
  """What a stranger is told."""
  with _knock(port) as stranger:
    word = _word(stranger)
    stranger.sendall(client.to_bytes(4, "little") + (proof or word + word))
    return str(_told(stranger))


_CLAIMS = {
  "zeros": bytes(32),
  "the word": b"",
  "another digest": b"b" * 32,
  "the digest of another word": meeting._hello(b"a", bytes(16), 1)[4:],
}


@pytest.mark.parametrize("name", _CLAIMS)
@pytest.mark.parametrize("number", [1, 0, 7, 2**32 - 1])
def test_who_does_not_know_the_secret_takes_no_id_and_ends_no_meeting(name, number):
  port = programs.free_port()
  calls = _Calls([_options(port, 0)])
  line = _claim(port, number, _CLAIMS[name])
  assert line.startswith("terms: differ") and len(line) < 300
  second = _Calls([_options(port, 1)])
  _close([*calls.wait(), *second.wait()])


def test_a_flood_of_claims_keeps_no_id():
  port = programs.free_port()
  calls = _Calls([_options(port, 0, count=2)])
  second = _Calls([_options(port, 1, count=2)])
  for _ in range(50):
    _claim(port, 2, b"b" * 32)
    _claim(port, 1, bytes(32))
  third = _Calls([_options(port, 2, count=2)])
  _close([*calls.wait(), *second.wait(), *third.wait()])


# --- peers with a mistake


def test_one_that_differs_is_told_so_and_the_others_go_on():
  port = programs.free_port()
  first = _Calls([_options(port, 0)])
  (line,) = _meet_all([_options(port, 1, secret=b"b")])
  assert line == "terms: differ between the server and client 1; nothing was run"
  second = _Calls([_options(port, 1)])
  _close([*first.wait(), *second.wait()])


@pytest.mark.slow
def test_another_secret_ends_there_at_once_and_here_when_time_is_over():
  """It may be a stranger, so that the server waits on; at its end it says what it saw."""
  port = programs.free_port()
  first, second = _meet_all(
    [_options(port, 0, timeout=2.0), _options(port, 1, secret=b"b")]
  )
  line = "terms: differ between the server and client 1; nothing was run"
  assert second == line
  assert first == f"client=1: did not come in time ({line}); see connect_timeout"


def test_a_second_of_one_number_is_told_so_and_the_others_go_on():
  port = programs.free_port()
  first = _Calls([_options(port, index, count=2) for index in (0, 1)])
  time.sleep(0.5)  # until 1 is there
  (line,) = _meet_all([_options(port, 1, count=2)])
  assert "client=1: two programs have it" in line
  third = _Calls([_options(port, 2, count=2)])
  _close([*first.wait(), *third.wait()])


@pytest.mark.parametrize("number", [0, 2, 7, 2**32 - 1])
def test_a_number_that_nobody_may_have_is_told_so(number):
  """A peer of our own kind whose own check was passed by."""
  port = programs.free_port()
  calls = _Calls([_options(port, 0)])
  with _knock(port) as peer:
    peer.sendall(meeting._hello(b"a", _word(peer), number))
    assert _told(peer).is_about("client", Verbatim(number))
  second = _Calls([_options(port, 1)])
  _close([*calls.wait(), *second.wait()])


def test_one_that_dies_before_the_others_come_may_come_again():
  port = programs.free_port()
  first = _Calls([_options(port, 0, count=2)])
  dying = _knock(port)
  dying.sendall(meeting._hello(b"a", _word(dying), 1))
  dying.close()
  time.sleep(0.5)  # until the server has seen both
  others = _Calls([_options(port, index, count=2) for index in (1, 2)])
  _close([*first.wait(), *others.wait()])


def test_who_never_comes_is_named():
  port = programs.free_port()
  (line,) = _meet_all([_options(port, 0, count=2, timeout=0.3)])
  assert line.startswith("client=1, 2: did not come in time")
  (line,) = _meet_all([_options(port, 1, timeout=0.3)])
  assert "the server was not there in time" in line


def test_a_port_in_use():
  with socket.create_server(("127.0.0.1", 0)) as taken:
    port = taken.getsockname()[1]
    (line,) = _meet_all([_options(port, 0)])
  assert f"coordinator=127.0.0.1:{port}: cannot listen there" in line
