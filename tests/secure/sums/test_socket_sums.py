"""A server and clients as processes: the killed drop out, the hung time out, others go on."""

import contextlib
import multiprocessing
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from dpjax.secure import meeting, sums
from dpjax.secure.sums import messages, primitives, secagg_client, socket_sums
from dpjax.validate import UserError
from tests import commands
from tests.federated import programs
from tests.refuses import refuses
from tests.secure.sums import parties

pytest.importorskip("cryptography", reason="needs the extra 'secure'")
pytest.importorskip("Crypto", reason="needs the extra 'secure'")

_FORK = multiprocessing.get_context("fork")
_N, _T, _LENGTH = 5, 3, 3000


def _terms(**others):
  return parties.terms(_N, _T, length=_LENGTH, session=os.urandom(16), **others)


def _vector(who):
  """Computed where it is used: the server's process never calls this for a client."""
  return parties.vectors(who + 1, _LENGTH)[who]


def _client(terms, who, at, act, key):
  """The program of a client; `act(kind)` runs before it answers with that kind."""
  answer = secagg_client.Client.answer

  def acting(member, data, vector=None):
    after, said = answer(member, data, vector)
    act(messages.KINDS[said[8]])
    return after, said

  secagg_client.Client.answer = acting
  with contextlib.suppress(UserError):
    socket_sums.take_part(terms, who, _vector(who), at, signing_key=key, connect_timeout=20)


def _nothing(kind):
  pass


def _killed(when):
  return lambda kind: kind == when and os.kill(os.getpid(), signal.SIGKILL)


def _hung(when):
  return lambda kind: kind == when and os.kill(os.getpid(), signal.SIGSTOP)


@contextlib.contextmanager
def _running(terms, at, acts=None, those=range(_N), keys=None):
  acts, children = acts or {}, []
  for who in those:
    arguments = (terms, who, at, acts.get(who, _nothing), (keys or {}).get(who))
    children.append(_FORK.Process(target=_client, args=arguments))
  for child in children:
    child.start()
  try:
    yield children
  finally:
    for child in children:
      child.kill()
      child.join()


def _serve(terms, acts=None, phase_timeout=10.0, connect_timeout=20.0, **others):
  """(the sum, what was reported, seconds)."""
  at, reports, start = f"127.0.0.1:{programs.free_port()}", [], time.monotonic()
  with _running(terms, at, acts, **others):
    summed = socket_sums.serve(
      terms,
      at,
      connect_timeout=connect_timeout,
      phase_timeout=phase_timeout,
      report=reports.append,
    )
  return summed, reports, time.monotonic() - start


def _is_sum_of(summed, survivors):
  assert summed.survivors == tuple(survivors)
  vectors = {who: _vector(who) for who in survivors}
  np.testing.assert_array_equal(summed.total, sums.PlainSum().sum(vectors).total)


@pytest.mark.slow
def test_processes_add_what_none_of_them_shows():
  summed, reports, _ = _serve(_terms())
  _is_sum_of(summed, range(_N))
  assert reports == []
  in_memory = sums.SecAgg(min_survivors=_T).sum({w: _vector(w) for w in range(_N)}).cost
  frames = 7 * 8  # messages of a client, with the length before each
  assert summed.cost.client_bytes == in_memory.client_bytes + frames
  assert summed.cost.server_bytes == in_memory.server_bytes + _N * frames
  assert summed.cost[2:4] == in_memory[2:4]


def test_signed_sums_need_no_trust_in_who_carries_letters():
  keys = {who: os.urandom(32) for who in range(_N)}
  directory = tuple(primitives.signing_public_key(keys[who]) for who in range(_N))
  terms = parties.terms(_N, 4, length=_LENGTH, directory=directory)
  summed, reports, _ = _serve(terms, {4: _killed("agreed")}, keys=keys)
  _is_sum_of(summed, range(_N))
  assert reports == ["agreed: client 4 closed its connection"]


@pytest.mark.long
def test_a_client_can_be_a_program_of_its_own(tmp_path):
  """With a vector that a user's function makes in its process; the keys there are its own."""
  (tmp_path / "my_update.py").write_text(
    "import numpy as np\n"
    "def vector(client):\n"
    f"  return np.full({_LENGTH}, 70 + client, np.uint32)\n"
  )
  terms, at = _terms(), f"127.0.0.1:{programs.free_port()}"
  file = tmp_path / "terms.json"
  file.write_text(socket_sums.serialise(terms))
  command = [sys.executable, "-m", "dpjax.secure.sums.socket_sums", str(file), at]
  program = subprocess.Popen([*command, "3", "my_update:vector"], cwd=tmp_path, env={
    **os.environ, "PYTHONPATH": f"{commands.ROOT}:{os.environ.get('PYTHONPATH', '')}"
  })  # fmt: skip
  with _running(terms, at, those=(0, 1, 2, 4)):
    summed = socket_sums.serve(terms, at, connect_timeout=60)
  assert program.wait(20) == 0 and summed.survivors == (0, 1, 2, 3, 4)
  rest = _vector(0) + _vector(1) + _vector(2) + _vector(4)
  np.testing.assert_array_equal(summed.total - rest, np.full(_LENGTH, 73, np.uint32))


@pytest.mark.cases(quick=["envelopes-False"], long=...)
@pytest.mark.parametrize(
  ("when", "counts"), [("envelopes", False), ("masked", False), ("revealed", True)]
)
def test_a_client_killed_in_any_phase_is_a_drop_out(when, counts):
  summed, reports, seconds = _serve(_terms(), {2: _killed(when)})
  _is_sum_of(summed, range(_N) if counts else (0, 1, 3, 4))
  assert reports == [f"{when}: client 2 closed its connection"]
  assert seconds < 10


def test_a_client_that_hangs_times_out():
  summed, reports, seconds = _serve(_terms(), {1: _hung("masked")}, phase_timeout=1.0)
  _is_sum_of(summed, (0, 2, 3, 4))
  assert reports == ["masked: client 1 is silent"] and seconds < 10


@pytest.mark.slow
def test_clients_that_never_come_are_left_out_and_too_few_are_refused():
  summed, _, _ = _serve(_terms(), those=(0, 2, 4), connect_timeout=1.5)
  _is_sum_of(summed, (0, 2, 4))
  with refuses("client"):
    _serve(_terms(), those=(0, 2), connect_timeout=1.0)
  with refuses("min_survivors"):
    _serve(_terms(), {who: _killed("masked") for who in (0, 2, 4)})


def _knocking(port):
  """A connection to the server, once it listens."""
  until = time.monotonic() + 10
  while time.monotonic() < until:
    with contextlib.suppress(OSError):
      return socket.create_connection(("127.0.0.1", port), timeout=10)
    time.sleep(0.05)
  raise AssertionError("nobody listens")


def _strangers(port, terms, answers):
  garbage = _knocking(port)
  garbage.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(range(256)))
  others = parties.terms(_N, _T, length=_LENGTH, session=bytes(16))
  for one, who in ((others, 1), (terms, _N + 3)):  # other terms, no such client
    with pytest.raises(UserError) as told:
      meeting.join(
        meeting.Address("127.0.0.1", port), who, socket_sums.secret_of(one), 10.0
      )
    answers.append(str(told.value))
  garbage.close()


def test_strangers_do_not_stop_a_sum():
  terms, port, answers, summed = _terms(), programs.free_port(), [], []
  at = f"127.0.0.1:{port}"
  serving = threading.Thread(
    target=lambda: summed.append(socket_sums.serve(terms, at, connect_timeout=20))
  )
  serving.start()
  _strangers(port, terms, answers)
  with _running(terms, at):
    serving.join(30)
  _is_sum_of(summed[0], range(_N))
  assert "terms: differ between the server and client 1" in answers[0]
  assert answers[1].startswith("client=8: is none of this sum")


def _liar(terms, at, who, says):
  """Joins as a client does, then says something else."""
  connection = meeting.join(meeting.address(at), who, socket_sums.secret_of(terms), 20)
  connection.sendall(says(terms, who))
  time.sleep(60)


_LIES = {
  "garbage": (lambda terms, who: b"\xff" * 4000, "announced 18446744073709551615 bytes"),
  "half a message": (lambda terms, who: struct.pack("<Q", 90) + b"abc", "is silent"),
  "another's keys": (
    lambda terms, who: (lambda d: struct.pack("<Q", len(d)) + d)(
      secagg_client.start(terms, 3)[1]
    ),
    "from client 1, who says to be client 3",
  ),
}


@pytest.mark.cases(quick=[2], long=...)
@pytest.mark.parametrize("name", list(_LIES))
def test_a_client_that_says_something_else_is_left_out(name):
  says, line = _LIES[name]
  terms, at, reports = _terms(), f"127.0.0.1:{programs.free_port()}", []
  liar = _FORK.Process(target=_liar, args=(terms, at, 1, says))
  liar.start()
  try:
    with _running(terms, at, those=(0, 2, 3, 4)):
      summed = socket_sums.serve(
        terms, at, connect_timeout=20, phase_timeout=2, report=reports.append
      )
  finally:
    liar.kill()
    liar.join()
  _is_sum_of(summed, (0, 2, 3, 4))
  assert len(reports) == 1 and line in reports[0] and "\n" not in reports[0]


def test_a_client_ends_in_one_line_when_the_server_does():
  terms, at = _terms(), f"127.0.0.1:{programs.free_port()}"
  with refuses("coordinator"):
    socket_sums.take_part(terms, 0, _vector(0), at, connect_timeout=0.3)
  errors = []

  def client():
    with pytest.raises(UserError) as caught:
      socket_sums.take_part(terms, 0, _vector(0), at, connect_timeout=10)
    errors.append(str(caught.value))

  thread = threading.Thread(target=client)
  thread.start()
  with meeting.listen(meeting.address(at)) as server:
    links = meeting.host(server, terms.clients, socket_sums.secret_of(terms), 0.5, fewest=1)
  for link in links.values():
    link.close()
  thread.join(10)
  assert errors[0].startswith("server: has ended the sum")


def test_terms_travel_as_a_file_and_wrong_ones_are_one_line(tmp_path):
  keys = {who: os.urandom(32) for who in range(_N)}
  directory = tuple(primitives.signing_public_key(keys[who]) for who in range(_N))
  terms = parties.terms(_N, 4, directory=directory)
  assert socket_sums.read(socket_sums.serialise(terms)) == terms
  cut = socket_sums.serialise(terms)[:-9]
  for text in ("", "[" * 10**5, "[]", "{}", "null", '{"session": 3}', cut):
    with refuses("terms"):
      socket_sums.read(text)
  with refuses("threshold", value=1):
    socket_sums.read(
      socket_sums.serialise(terms).replace('"threshold": 4', '"threshold": 1')
    )
  file = tmp_path / "terms.json"
  file.write_text(socket_sums.serialise(terms))
  binary = tmp_path / "binary"
  binary.write_bytes(b"\xff\xfe")
  for arguments, says in {
    (): "socket_sums",
    ("none.json", "h:1", "2", "a:b"): "terms",
    (str(file), "h:1", "\u00b2", "a:b"): "socket_sums",
    (str(binary), "h:1", "2", "a:b"): "terms",
    (str(file), "h:1", "2", "ab"): "vector",
    (str(file), "h:1", "2", "dpjax.nothing:x"): "vector",
  }.items():
    with refuses(says):
      socket_sums.main([*arguments])


@contextlib.contextmanager
def _lines(count):
  """(the server's lines, the clients' ends)."""
  pairs = [socket.socketpair() for _ in range(count)]
  try:
    lines = {who: socket_sums._Line(a) for who, (a, _) in enumerate(pairs)}
    yield lines, [b for _, b in pairs]
  finally:
    for end in (end for pair in pairs for end in pair):
      end.close()


@pytest.mark.cases(long=["67108864"])
@pytest.mark.parametrize("most", [10**6, 2**26])
def test_letters_that_never_end_keep_nobody_from_being_heard(monkeypatch, most):
  monkeypatch.setattr(socket_sums, "_STALL", 0.2)
  monkeypatch.setattr(socket_sums, "_TURN", 0.02)
  slow, ended = 8, threading.Event()
  with _lines(slow + 1) as (lines, ends):

    def trickle():
      while not ended.wait(0.05):
        for end in ends[:slow]:
          end.send(b"x")

    for end in ends[:slow]:
      end.send(struct.pack("<Q", most))
    thread = threading.Thread(target=trickle)
    thread.start()
    late = threading.Timer(0.3, ends[slow].send, [struct.pack("<Q", 5) + b"hello"])
    late.start()
    try:
      heard = dict(socket_sums._heard(lines, [*lines], most, time.monotonic() + 2.0))
    finally:
      ended.set()
      thread.join()
  assert heard[slow] == b"hello"


def _reads(end, length):
  """Takes a message, then answers; what it took."""
  data = bytearray()
  while len(data) < length + 8:
    data += end.recv(1 << 20)
  end.sendall(struct.pack("<Q", 5) + b"hello")
  return bytes(data[8:])


def test_clients_that_do_not_read_keep_no_letter_from_the_others(monkeypatch):
  """More than a socket's buffer for each: all are sent at once, within the phase's clock."""
  monkeypatch.setattr(socket_sums, "_STALL", 1.5)
  monkeypatch.setattr(socket_sums, "_TURN", 0.02)
  deaf, honest, message = 8, 3, os.urandom(3 << 20)
  with _lines(deaf + honest) as (lines, ends):
    for line in lines.values():  # the deaf come first
      line.put(message)
    taken = {}
    threads = [
      threading.Thread(
        target=lambda end=end: taken.update({end: _reads(end, len(message))})
      )
      for end in ends[deaf:]
    ]
    for thread in threads:
      thread.start()
    heard = list(socket_sums._heard(lines, [*lines], 10**6, time.monotonic() + 60))
    for thread in threads:
      thread.join()
    assert set(taken.values()) == {message} and len(taken) == honest
  assert {who for who, _ in heard[:honest]} == {*range(deaf, deaf + honest)}
  assert {said for _, said in heard[:honest]} == {b"hello"}
  assert [said for _, said in heard[honest:]] == ["does not take its message"] * deaf


def test_a_phase_ends_on_time_whatever_clients_take():
  """One takes a byte now and then, one nothing: neither holds the phase past its end."""
  ended = threading.Event()
  with _lines(2) as (lines, ends):
    for line in lines.values():
      line.put(bytes(3 << 20))

    def trickle():
      while not ended.wait(0.05):
        ends[0].recv(1)

    thread = threading.Thread(target=trickle)
    thread.start()
    try:
      heard = dict(socket_sums._heard(lines, [0, 1], 10**6, time.monotonic() + 1.0))
    finally:
      ended.set()
      thread.join()
  assert heard == {0: "is silent", 1: "is silent"}


def test_a_client_that_closes_before_its_letter_is_gone():
  with _lines(2) as (lines, ends):
    for line in lines.values():
      line.put(bytes(3 << 20))
    ends[0].close()
    heard = socket_sums._heard(lines, [0, 1], 10**6, time.monotonic() + 60)
    who, said = next(heard)
  assert who == 0 and said in ("closed its connection", "does not take its message")
