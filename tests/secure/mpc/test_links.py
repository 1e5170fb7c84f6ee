"""Sockets between two ends: sealed, and every broken or hostile peer is one line in time."""

import contextlib
import socket
import ssl
import threading
import time

import pytest

from dpjax.secure.mpc import links
from dpjax.validate import UserError
from tests.refuses import refuses

pytest.importorskip("cryptography", reason="needs the extra 'secure'")
pytest.importorskip("Crypto", reason="needs the extra 'secure'")

_TOKEN = b"sixteen bytes or more"


class _Tap:
  """A network between two ends. What party 1 sends may be kept or changed on its way."""

  def __init__(self, change):
    self.sent = []
    self.ends = []
    middles = []
    for _ in range(2):
      end, middle = _sockets()
      self.ends.append(end)
      middles.append(middle)

    def altered(data):
      changed = change(len(self.sent), data)
      self.sent.append(data)
      return changed

    for way in ((middles[0], middles[1], bytes), (middles[1], middles[0], altered)):
      threading.Thread(target=_carry, args=way, daemon=True).start()


def _carry(incoming, outgoing, change):
  with contextlib.suppress(OSError):
    while data := incoming.recv(1 << 16):
      outgoing.sendall(change(data))
  for end, way in ((outgoing, socket.SHUT_WR), (incoming, socket.SHUT_RD)):
    with contextlib.suppress(OSError):
      end.shutdown(way)


def _link(connection, number, **settings):
  names = [f"party {number}", f"party {1 - number}"]
  options = {"token": _TOKEN, "timeout": 2.0} | settings
  link = links.SocketLink(connection, me=names[0], peer=names[1], **options)
  _OPEN.append(link)
  return link


@pytest.fixture(autouse=True)
def _closed():
  """Sockets and links that a test left open are closed."""
  yield
  for end in _OPEN:
    end.close()
  _OPEN.clear()


_OPEN = []


def _sockets():
  _OPEN.extend(socket.socketpair())
  return _OPEN[-2:]


def _pair(change=lambda number, data: data, other=None, **settings):
  """Both ends of a link; party 1's bytes may be changed, and its settings may be others."""
  tap, made = _Tap(change), []
  ours, theirs = tap.ends

  def second():
    with contextlib.suppress(UserError):
      made.append(_link(theirs, 1, **(settings | (other or {}))))

  thread = threading.Thread(target=second)
  thread.start()
  try:
    first = _link(ours, 0, **settings)
  finally:
    thread.join()
  return first, made[0], tap


def test_what_is_sent_arrives_and_is_counted():
  first, second, tap = _pair()
  first.send(b"abc")
  assert second.receive(3) == b"abc"
  big = bytes(8_000_000)  # more than a socket buffers: both must write and read at once
  answer = []
  thread = threading.Thread(target=lambda: answer.append(second.exchange(big)))
  thread.start()
  assert first.exchange(big) == big
  thread.join()
  assert answer == [big]
  assert (first.bytes_sent, first.bytes_received, first.rounds) == (8_000_003, 8_000_000, 1)
  assert (second.bytes_sent, second.bytes_received, second.rounds) == (
    8_000_000,
    8_000_003,
    2,
  )
  assert big[:64] not in b"".join(tap.sent)  # sealed


def test_who_lacks_the_token_or_has_another_topic_or_name_cannot_take_part():
  for other in ({"token": b"another token, 16"}, {"topic": "another"}):
    with pytest.raises(links.PeerFailed, match="message 0 is not what it sealed"):
      _pair(other=other)
  ours, theirs = _sockets()
  thread = threading.Thread(target=_a_dealer, args=(theirs,))
  thread.start()
  with pytest.raises(links.PeerFailed, match="message 0 is not|silent|closed"):
    _link(ours, 0, timeout=0.5)
  thread.join()
  with refuses("token"):
    _link(ours, 0, token=b"abc")


def _a_dealer(connection):
  """A dealer where a party should be."""
  with contextlib.suppress(UserError):
    links.SocketLink(connection, me="dealer", peer="party 0", token=_TOKEN, timeout=0.5)


@pytest.mark.parametrize(
  ("change", "line"),
  [
    (lambda frame, before: frame[:-1] + bytes([frame[-1] ^ 1]), "message 1 is not what"),
    (lambda frame, before: before, "message 1 is not what"),  # replayed
    # the length of TLS's record
    (lambda frame, before: frame[:3] + b"\0\x14" + frame[5:], "message 1 is not what"),
    (lambda frame, before: b"\xff" * len(frame), "message 1 is not what"),
    (lambda frame, before: frame[:5], "silent for 0.3 seconds"),
  ],
)
def test_garbage_replays_and_wrong_lengths_are_one_line(change, line):
  """Of a peer that has the token: what it writes after the greeting."""
  kept, greeted = [], threading.Event()

  def on_the_way(number, data):
    changed = change(data, kept[-1]) if greeted.is_set() else data
    kept.append(data)
    return changed

  first, second, _ = _pair(on_the_way, timeout=0.3)
  greeted.set()
  second.send(b"data")
  with pytest.raises(links.PeerFailed, match=line) as error:
    first.receive(4)
  assert "\n" not in str(error.value) and str(error.value).startswith("party 1: ")


def test_a_message_of_another_length_is_one_line_and_ends_the_link():
  """The header is read: what follows would be taken for another message."""
  first, second, _ = _pair()
  second.send(bytes(983))
  with pytest.raises(links.PeerFailed, match="party 1: sent 983 bytes where 4 were due"):
    first.receive(4)
  for call in (lambda: first.receive(983), lambda: first.send(b"x")):
    with pytest.raises(links.PeerFailed, match="party 1: the link has failed before"):
      call()


def test_after_half_a_message_nothing_more_is_sent():
  first, second, _ = _pair(timeout=0.3)
  with pytest.raises(links.PeerFailed, match="silent for 0.3 seconds"):
    first.send(bytes(30_000_000))
  for call in (lambda: first.send(b"abc"), lambda: first.exchange(b"abc")):
    with pytest.raises(links.PeerFailed, match="the link has failed before"):
      call()
  second.close()
  for call in (lambda: second.receive(3), lambda: second.send(b"abc")):
    with pytest.raises(links.PeerFailed, match="the link was closed"):
      call()


def test_a_peer_that_ends_tls_is_gone_at_once():
  """And its bytes after that are not kept."""
  first, second, _ = _pair(timeout=5.0)
  with contextlib.suppress(ssl.SSLError):
    second._connection.unwrap()
  begun = time.monotonic()
  with pytest.raises(links.PeerFailed, match="message 1 is not what it sealed"):
    first.receive(1)
  assert time.monotonic() - begun < 2


def test_what_cannot_be_waited_for_is_one_line(monkeypatch):
  ours, _ = _sockets()
  ours.close()
  with pytest.raises(links.PeerFailed, match="party 1: its connection cannot be used"):
    _link(ours, 0)
  first, *_ = _pair(timeout=1e300)
  first.send(b"abc")
  with refuses("token"):
    _link(_sockets()[0], 0, token="sixteen letters or more")

  def none_left():
    raise OSError(24, "Too many open files")

  monkeypatch.setattr(links.selectors, "DefaultSelector", none_left)
  ours, _ = _sockets()
  with pytest.raises(links.PeerFailed, match="Too many open files"):
    _link(ours, 0)
  assert ours.fileno() == -1


@pytest.mark.parametrize("place", [0, 7])
def test_an_altered_hello_is_refused(place):
  def alter(number, data):
    if number:
      return data
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]

  with pytest.raises(links.PeerFailed, match="message 0 is not what|closed|silent"):
    _pair(alter, timeout=0.5)


def test_messages_of_one_connection_have_a_bound(monkeypatch):
  first, second, _ = _pair()
  monkeypatch.setattr(links, "_MOST_UNDER_ONE_KEY", 14)
  first.send(b"ten bytes.")
  assert second.receive(10) == b"ten bytes."
  with pytest.raises(UserError, match="14 bytes were sent, the most of one connection"):
    first.send(b"5 more")


def test_what_is_read_at_once_is_given_in_parts():
  """Several messages come in one piece of the network, and one message in several."""
  first, second, _ = _pair()
  for number in range(50):
    second.send(bytes([number]) * number)
  assert [first.receive(number)[:1] for number in range(50)] == [
    bytes([number])[: number > 0] for number in range(50)
  ]


def test_a_meeting_that_is_replayed_opens_nothing():
  """The keys of a session are its own, and of one session alone: ephemeral keys of TLS 1.3."""
  first, second, tap = _pair()
  second.send(b"secret words")
  assert first.receive(12) == b"secret words"
  assert b"secret words" not in b"".join(tap.sent)
  assert first._connection.version() == second._connection.version() == "TLSv1.3"
  ours, theirs = _sockets()
  for data in tap.sent:
    theirs.send(data)
  with pytest.raises(links.PeerFailed, match="message 0 is not what|has closed|silent"):
    _link(ours, 0, timeout=0.5)


def test_an_end_of_the_same_name_is_refused():
  ours, theirs = _sockets()
  thread = threading.Thread(target=_of_the_same_name, args=(theirs,))
  thread.start()
  with pytest.raises(links.PeerFailed, match="message 0 is not|silent|closed"):
    _link(ours, 0, timeout=0.5)
  thread.join()


def _of_the_same_name(connection):
  with contextlib.suppress(UserError):
    _link(connection, 0, timeout=0.5)


def test_a_message_of_any_length_has_a_bound():
  first, second, _ = _pair()
  thread = threading.Thread(target=_sends, args=(second, bytes(9000), bytes(2_000_000)))
  thread.start()
  assert len(first.receive(None)) == 9000
  with pytest.raises(links.PeerFailed, match="announced 2000000 bytes, at most"):
    first.receive(None)
  first.close()
  thread.join()


def _sends(link, *messages):
  with contextlib.suppress(UserError):
    for data in messages:
      link.send(data)


def test_a_message_that_is_too_long_is_one_line(monkeypatch):
  first, *_ = _pair()
  monkeypatch.setattr(links, "_MOST", 10)
  with pytest.raises(UserError, match="party 1: 11 bytes are no one message; at most 10"):
    first.send(bytes(11))


def test_a_peer_that_is_gone_or_silent_is_noticed_in_time():
  first, second, _ = _pair(timeout=0.3)
  start = time.monotonic()
  with pytest.raises(links.PeerFailed, match="party 1: silent for 0.3 seconds"):
    first.receive(1)
  assert time.monotonic() - start < 2
  second.close()
  with pytest.raises(links.PeerFailed, match="party 1: has closed its connection"):
    first.exchange(b"1234")


def test_a_queue_has_the_same_manners():
  first, second = links.queue_links(timeout=0.1)
  with pytest.raises(links.PeerFailed, match="party 1: silent for 0.1 seconds"):
    first.receive(1)
  second.send(b"ab")
  with pytest.raises(links.PeerFailed, match="sent 2 bytes where 1 were due"):
    first.receive(1)
  second.close()
  with pytest.raises(links.PeerFailed, match="party 1: has left"):
    first.receive(1)
