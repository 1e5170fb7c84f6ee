"""A committee whose clients are programs: the same sum, and nobody waits for who is gone."""

import contextlib
import multiprocessing
import os
import signal
import struct
import subprocess
import sys
import time

import numpy as np
import pytest

from dpjax.secure import meeting, sums
from dpjax.secure.sums import committee_parties, messages, socket_sums
from dpjax.validate import UserError
from tests import commands
from tests.federated import programs
from tests.refuses import refuses
from tests.secure.sums import parties

pytest.importorskip("cryptography", reason="needs the extra 'secure'")

_FORK = multiprocessing.get_context("fork")
_CLIENTS = (3, 4, 7, 9, 11, 20)
_PROTOCOL = sums.Committee(num_members=4, colluding=1, packed=2, min_survivors=3)
_LENGTH = 3000


def _vector(who, length=_LENGTH):
  return parties.vectors(who + 1, length)[who]


def _client(terms, who, at, act):
  """The program of a client; `act(kind)` runs before it sends a message of that kind."""
  answer = committee_parties.Client.answer

  def acting(client, data, vector=None):
    after, said = answer(client, data, vector)
    act(messages.kind(said) if said else messages.kind(data))
    return after, said

  committee_parties.Client.answer = acting
  with contextlib.suppress(UserError):
    socket_sums.take_part(terms, who, _vector(who, terms.length), at, connect_timeout=20)


def _nothing(kind):
  pass


def _does(number, when):
  return lambda kind: kind == when and os.kill(os.getpid(), number)


def _serve(terms, acts=None, *, those=_CLIENTS, phase_timeout=10.0, connect_timeout=20.0):
  """Returns the sum, and what was reported."""
  at = f"127.0.0.1:{programs.free_port()}"
  reports = []
  children = [
    _FORK.Process(target=_client, args=(terms, who, at, (acts or {}).get(who, _nothing)))
    for who in those
  ]
  for child in children:
    child.start()
  try:
    summed = socket_sums.serve(
      terms,
      at,
      connect_timeout=connect_timeout,
      phase_timeout=phase_timeout,
      report=reports.append,
    )
  finally:
    for child in children:
      child.kill()
      child.join()
  return summed, reports


def _terms(length=_LENGTH, protocol=_PROTOCOL):
  return protocol.terms(_CLIENTS, length)


def _is_sum_of(summed, survivors, length=_LENGTH):
  assert summed.survivors == tuple(survivors)
  vectors = {who: _vector(who, length) for who in survivors}
  np.testing.assert_array_equal(summed.total, sums.PlainSum().sum(vectors).total)


def _outsiders(terms):
  return [who for who in terms.clients if who not in terms.members]


def test_programs_add_what_none_of_them_shows():
  terms = _terms()
  summed, reports = _serve(terms)
  _is_sum_of(summed, _CLIENTS)
  assert reports == []
  in_memory = _PROTOCOL.sum({who: _vector(who) for who in _CLIENTS}).cost
  # A member sends 3 messages and receives a roster, 6 shares and a list, each after its length.
  assert summed.cost.client_bytes == in_memory.client_bytes + 8 * (3 + 1 + 6 + 1)
  messages_of_all = 4 * (3 + 1 + 6 + 1) + 2 * 2
  assert summed.cost.server_bytes == in_memory.server_bytes + 8 * messages_of_all
  assert summed.cost[2:4] == in_memory[2:4]


@pytest.mark.slow
def test_shares_above_the_buffers_of_sockets_arrive():
  """Each member is sent 6 MB, and all members are sending 9 MB of their own meanwhile."""
  length = 500_000
  summed, reports = _serve(_terms(length), phase_timeout=60.0)
  _is_sum_of(summed, _CLIENTS, length)
  assert reports == []


def test_who_is_silent_before_its_message_is_not_in_the_sum():
  terms = _terms()
  gone, hung = _outsiders(terms)
  acts = {gone: _does(signal.SIGKILL, "shares"), hung: _does(signal.SIGSTOP, "shares")}
  summed, reports = _serve(terms, acts, phase_timeout=1.0)
  _is_sum_of(summed, sorted(terms.members))
  assert sorted(reports) == sorted(
    [f"shares: client {gone} closed its connection", f"shares: client {hung} is silent"]
  )


@pytest.mark.cases(slow=["forwarded"])
@pytest.mark.parametrize("when", ["forwarded", "sums"])
def test_a_member_that_leaves_after_its_shares_is_not_needed(when):
  terms = _terms()
  member = terms.members[1]
  summed, reports = _serve(terms, {member: _does(signal.SIGKILL, when)}, phase_timeout=5.0)
  # Its own vector had come.
  _is_sum_of(summed, _CLIENTS)
  assert reports == [f"sums: client {member} closed its connection"]


@pytest.mark.slow
def test_a_member_that_hangs_costs_one_phase():
  terms = _terms()
  member = terms.members[0]
  begun = time.monotonic()
  acts = {member: _does(signal.SIGSTOP, "forwarded")}
  summed, reports = _serve(terms, acts, phase_timeout=2.0)
  _is_sum_of(summed, _CLIENTS)
  assert reports == [f"sums: client {member} is silent"]
  assert time.monotonic() - begun < 15


def test_too_few_members_end_the_sum():
  terms = _terms()
  acts = {who: _does(signal.SIGKILL, "sums") for who in terms.members[:2]}
  with refuses("committee"):
    _serve(terms, acts)
  # Outsiders alone cannot begin: the roster would be empty.
  with refuses("client"):
    _serve(terms, those=_outsiders(terms), connect_timeout=1.0)


@pytest.mark.slow
def test_members_that_never_come_are_not_on_the_roster():
  terms = _terms()
  absent = terms.members[3]
  there = [who for who in _CLIENTS if who != absent]
  summed, reports = _serve(terms, those=there, connect_timeout=1.5)
  _is_sum_of(summed, there)
  assert reports == [f"client {absent} did not come in time"]


@pytest.mark.slow
def test_a_member_that_reads_slowly_stays():
  """It takes 100 kB a second all the time, of 1.2 MB that it is sent."""
  length = 100_000
  terms = _terms(length)
  slow = terms.members[0]
  read = socket_sums._read

  def slowly(connection, size, until):
    data = bytearray()
    while len(data) < size:
      data += read(connection, min(size - len(data), 10_000), until)
      time.sleep(0.1)
    return bytes(data)

  def act(kind):
    if kind == "shares":
      socket_sums._read = slowly

  summed, reports = _serve(terms, {slow: act}, phase_timeout=60.0)
  _is_sum_of(summed, _CLIENTS, length)
  assert reports == []


def _liar(terms, at, who, says):
  connection = meeting.join(meeting.address(at), who, socket_sums.secret_of(terms), 20)
  connection.sendall(says(terms, who))
  time.sleep(60)


def _framed(data):
  return struct.pack("<Q", len(data)) + data


_LIES = {
  "garbage": (lambda terms, who: b"\xff" * 4000, "keys: client {} announced 1844674407"),
  "half a message": (
    lambda terms, who: struct.pack("<Q", 70) + b"abc",
    "keys: client {} is",
  ),
  "the keys of another": (
    lambda terms, who: _framed(committee_parties.start(terms, terms.members[0])[1]),
    "keys: from client {}, who says to be client {other}",
  ),
  "another session": (
    lambda terms, who: _framed(
      messages.write("keys", bytes(16), who, {who: bytes(committee_parties.KEY_BYTES)})
    ),
    "keys: from client {} is of another session",
  ),
}


@pytest.mark.cases(slow=["garbage", "the keys of another", "half a message"])
@pytest.mark.parametrize("name", list(_LIES))
def test_a_member_that_says_something_else_is_left_out(name):
  says, line = _LIES[name]
  terms = _terms()
  who = terms.members[2]
  at = f"127.0.0.1:{programs.free_port()}"
  liar = _FORK.Process(target=_liar, args=(terms, at, who, says))
  others = [
    _FORK.Process(target=_client, args=(terms, other, at, _nothing))
    for other in _CLIENTS
    if other != who
  ]
  for child in (liar, *others):
    child.start()
  reports = []
  try:
    summed = socket_sums.serve(
      terms, at, connect_timeout=20, phase_timeout=1, report=reports.append
    )
  finally:
    for child in (liar, *others):
      child.kill()
      child.join()
  _is_sum_of(summed, [other for other in _CLIENTS if other != who])
  assert len(reports) == 1 and line.format(who, other=terms.members[0]) in reports[0]


def test_a_member_does_not_answer_a_list_of_others():
  """The server would learn another sum. The member's program ends, with one line."""
  terms = _terms()
  me = terms.members[0]
  party, first = socket_sums.client(terms, me)
  server = socket_sums.server(terms)
  for member in terms.members:
    keys = first if member == me else committee_parties.start(terms, member)[1]
    server, _ = server.receive(keys, member)
  server, rosters = server.close()
  assert not party.is_done
  party, said = party.answer(rosters[me], _vector(me))
  server, kept = server.receive(said, me)
  for who in (who for who in terms.clients[:4] if who != me):
    _, said = committee_parties.start(terms, who)[0].answer(rosters[who], _vector(who))
    server, forwarded = server.receive(said, who)
    party, said = party.answer(forwarded[me], _vector(me))
    assert said is None
  server, lists = server.close()
  with refuses("survivors"):
    party.answer(lists[me], _vector(me))
  assert not party.is_done
  # The share that it missed was its own.
  party, _ = party.answer(kept[me], _vector(me))
  party, said = party.answer(lists[me], _vector(me))
  assert said is not None and party.is_done


def test_terms_of_a_committee_travel_as_a_file(tmp_path):
  terms = _terms()
  assert socket_sums.read(socket_sums.serialise(terms)) == terms
  for old, new in (
    ('"num_members": 4', '"num_members": 1'),
    ('"protocol": "committee"', '"protocol": "plain"'),
    ('"packed": 2', '"packed": null'),
    ('"length": 3000', '"length": -3'),
    ('"protocol": "committee", ', ""),
    ('"min_survivors": 3', '"min_survivors": 7'),
  ):
    text = socket_sums.serialise(terms)
    assert old in text
    with pytest.raises(UserError):
      socket_sums.read(text.replace(old, new))
  numpy_terms = _PROTOCOL.terms(np.array(_CLIENTS), np.int64(_LENGTH))
  assert socket_sums.read(socket_sums.serialise(numpy_terms)) == numpy_terms
  for at in ("h:" + "9" * 5000, ".:9000", "a" * 70 + ":9000"):
    with refuses("coordinator"):
      socket_sums.take_part(terms, 3, _vector(3), at, connect_timeout=0.5)
  for wrong in (None, [1], _vector(3)[:-1], _vector(3).astype(np.int32)):
    with refuses("vector"):
      socket_sums.take_part(terms, 3, wrong, "127.0.0.1:9", connect_timeout=0.5)
  with refuses("connect_timeout", value=float("nan")):
    socket_sums.take_part(terms, 3, _vector(3), "127.0.0.1:9", connect_timeout=float("nan"))
  with refuses("signing_key"):
    socket_sums.client(terms, 3, signing_key=bytes(32))
  with refuses("client", value=5):
    socket_sums.client(terms, 5)


def test_a_client_of_a_committee_is_a_program_of_its_own(tmp_path):
  (tmp_path / "my_update.py").write_text(
    "import numpy as np\n"
    "def vector(client):\n"
    f"  return np.full({_LENGTH}, 70 + client, np.uint32)\n"
  )
  terms = _terms()
  at = f"127.0.0.1:{programs.free_port()}"
  file = tmp_path / "terms.json"
  file.write_text(socket_sums.serialise(terms))
  environment = {
    **os.environ,
    "PYTHONPATH": f"{commands.ROOT}:{os.environ.get('PYTHONPATH', '')}",
  }
  alone, *others = terms.members
  command = [sys.executable, "-m", "dpjax.secure.sums.socket_sums", str(file), at]
  program = subprocess.Popen(
    [*command, str(alone), "my_update:vector"], cwd=tmp_path, env=environment
  )
  others += _outsiders(terms)
  children = [
    _FORK.Process(target=_client, args=(terms, who, at, _nothing)) for who in others
  ]
  for child in children:
    child.start()
  try:
    summed = socket_sums.serve(terms, at, connect_timeout=60)
    assert program.wait(60) == 0
  finally:
    for child in (program, *children):
      child.kill()
    for child in children:
      child.join()
    program.wait()
  assert summed.survivors == _CLIENTS
  rest = sum((_vector(who) for who in others), np.zeros(_LENGTH, np.uint32))
  expected = np.full(_LENGTH, 70 + alone, np.uint32)
  np.testing.assert_array_equal(summed.total - rest, expected)
