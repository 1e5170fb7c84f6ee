"""Two parties and the dealer in processes of their own: the same bits, and nothing but shares."""

import dataclasses
import socket
import threading
import time

import jax
import numpy as np
import pytest

from dpjax.secure import meeting, mpc
from dpjax.secure.mpc import links, private_values, ring64, secureml, three_programs
from dpjax.validate import UserError
from tests.refuses import refuses
from tests.secure.mpc import programs

pytest.importorskip("cryptography", reason="needs the extra 'secure'")
pytest.importorskip("Crypto", reason="needs the extra 'secure'")

_TOKEN = bytes(range(16))


@pytest.fixture(scope="module")
def ran():
  """A short training, of two processes and of two threads, by the same seed."""
  rng = np.random.default_rng(0)
  x = rng.normal(size=(16, 12))
  y = np.eye(3)[x[:, :3].argmax(1)]
  network = secureml.initial((12, 8, 3), seed=1)
  inputs = private_values.split((network, x, y), seed=2)
  apart = three_programs.run_processes(programs.train, *inputs, seed=0)
  return apart, mpc.run(programs.train, *inputs, seed=0), (network, x, y)


@pytest.mark.long
def test_processes_compute_what_threads_compute_bit_for_bit(ran):
  apart, together, _ = ran
  for one, other in zip(apart.outputs, together.outputs):
    assert one[1] == other[1]  # all messages, too
    same = jax.tree.map(lambda a, b: (a == b).all(), one[0], other[0])
    assert all(jax.tree.leaves(same))
  assert apart.spent == together.spent
  assert apart.setting.startswith("simulation: ") and "a process each" in apart.setting


@pytest.mark.long
def test_what_crosses_between_the_processes_is_uniform_and_all_of_it(ran):
  """Of the data nothing is seen but shares and masked values."""
  apart, _, _ = ran
  (_, seen), spent = apart.outputs[0], apart.spent[0]
  assert len(seen) == spent.bytes_sent + spent.bytes_received > 10_000
  assert programs.looks_uniform(seen[: len(seen) // 8 * 8])


@pytest.mark.slow
def test_a_value_sent_in_the_clear_would_be_seen(ran):
  _, seen = ran[0].outputs[0]
  x = ran[2][1]
  leaked = seen + ring64.encode(x).tobytes()
  assert not programs.looks_uniform(leaked[: len(leaked) // 8 * 8])


@pytest.mark.long
@pytest.mark.parametrize(
  ("program", "line"),
  [
    (programs.dies, "party 1: has closed its connection|a process has died"),
    (programs.hangs, "party 1: silent for 3 seconds"),
    (programs.stops, "party 1: silent for 3 seconds"),  # deaf to the signal to end, too
    (programs.raises, "x: holds 1e.09, must be below"),
    (programs.has_a_bug, "party 1: KeyError: 'a bug of its own'"),
  ],
)
def test_a_process_that_fails_is_one_line_in_time(program, line):
  start = time.monotonic()
  with pytest.raises(UserError, match=line) as error:
    three_programs.run_processes(program, timeout=3.0)
  assert "\n" not in str(error.value) and time.monotonic() - start < 40


def test_a_program_that_no_process_can_import_is_one_line():
  with refuses("program"):
    three_programs.run_processes(lambda party: None)


# --- the programs themselves, in threads


def _free_port():
  with socket.create_server(("127.0.0.1", 0)) as server:
    return f"127.0.0.1:{server.getsockname()[1]}"


def _parties(*agreed, program=lambda party: mpc.relu(party, np.zeros(2, np.uint64))):
  """Outcomes of dealer and both parties, each with what it was told."""
  dealer, peer = _free_port(), _free_port()
  where = ({"listen": peer}, {"peer": peer})
  outcomes = {}

  def act(number):
    try:
      if number == 2:
        three_programs.serve_dealer(dealer, agreed[2])
        return
      with three_programs.connect(
        number, agreed[number], dealer=dealer, **where[number]
      ) as party:
        outcomes[number] = program(party)
    except UserError as error:
      outcomes[number] = error

  threads = [threading.Thread(target=act, args=(number,)) for number in (2, 0, 1)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(20)
  return outcomes


def test_three_programs_meet_by_address_and_token():
  agreed = three_programs.Agreed(_TOKEN, timeout=5.0)
  outcomes = _parties(agreed, agreed, agreed)
  assert np.add(outcomes[0], outcomes[1]).tolist() == [0, 0]


@pytest.mark.parametrize(
  "change",
  [{"token": bytes(16)}, {"frac_bits": 16}, {"truncation": "local"}, {"topic": "x"}],
)
def test_parties_that_were_told_other_things_do_not_start(change):
  agreed = three_programs.Agreed(_TOKEN, timeout=1.0)
  outcomes = _parties(agreed, dataclasses.replace(agreed, **change), agreed)
  assert all(isinstance(outcomes[number], links.PeerFailed) for number in (0, 1))
  assert "did not come in time" in str(outcomes[0])


def test_a_stranger_is_let_go_and_the_run_goes_on(monkeypatch):
  """Somebody else's program comes to the dealer before the parties."""
  real = meeting._reach

  def first_a_stranger(at, deadline):
    with real(at, deadline) as stranger:
      stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
    return real(at, deadline)

  monkeypatch.setattr(meeting, "_reach", first_a_stranger)
  agreed = three_programs.Agreed(_TOKEN, timeout=5.0)
  outcomes = _parties(agreed, agreed, agreed)
  assert np.add(outcomes[0], outcomes[1]).tolist() == [0, 0]


def _address(at):
  host, port = at.split(":")
  return host, int(port)


def _knocks(at, count, says):
  """Connections that say something and stay, made once somebody listens there."""
  until = time.monotonic() + 20
  found = []
  while len(found) < count:
    try:
      found.append(socket.create_connection(_address(at), timeout=20))
      found[-1].sendall(says)
    except OSError:
      assert time.monotonic() < until
      time.sleep(0.02)
  return found


@pytest.mark.cases(long=[1, 3, 5, 7])
@pytest.mark.parametrize("count", [4, 150])
@pytest.mark.parametrize("says", [b"", b"0", b"1" + bytes(31), b"GET / HTTP/1.1\r\n\r\n"])
def test_strangers_that_stay_keep_nobody_apart(says, count):
  """At both doors, before those who are waited for; more than are greeted at once, too."""
  agreed = three_programs.Agreed(_TOKEN, timeout=9.0)
  dealer, peer = _free_port(), _free_port()
  outcomes = {}

  def act(number):
    where = {"listen": peer} if number == 0 else {"peer": peer}
    try:
      if number == 2:
        return three_programs.serve_dealer(dealer, agreed)
      with three_programs.connect(number, agreed, dealer=dealer, **where) as party:
        outcomes[number] = mpc.relu(party, np.zeros(2, np.uint64))
    except UserError as error:
      outcomes[number] = error

  threads = [threading.Thread(target=act, args=(number,)) for number in (2, 0, 1)]
  threads[0].start()
  strangers = _knocks(dealer, count, says)
  threads[1].start()
  strangers += _knocks(peer, count, says)
  threads[2].start()
  for thread in threads:
    thread.join(60)
  for stranger in strangers:
    stranger.close()
  assert np.add(outcomes[0], outcomes[1]).tolist() == [0, 0]


def test_nobody_there_and_wrong_arguments_are_one_line():
  agreed = three_programs.Agreed(_TOKEN, timeout=0.2)
  taken = socket.create_server(("127.0.0.1", 0))
  in_use = f"127.0.0.1:{taken.getsockname()[1]}"
  for number, arguments, field in (
    (1, {"listen": "127.0.0.1:1"}, "number"),
    (1, {"peer": "127.0.0.1:1"}, "party 0"),
    (1, {"peer": "a:1", "dealer": "nonsense"}, "dealer"),
    (1, {"peer": "nonsense"}, "peer"),
    (0, {"listen": "nonsense"}, "listen"),
    (0, {"listen": in_use}, "listen"),
  ):
    where = {"dealer": _free_port()} | arguments
    with refuses(field), three_programs.connect(number, agreed, **where):
      pass
  with taken, refuses("listen"):
    three_programs.serve_dealer(in_use, agreed)
  with pytest.raises(links.PeerFailed, match="did not come in time"):
    three_programs.serve_dealer(_free_port(), agreed)


@pytest.mark.parametrize(
  ("agreed", "line"),
  [
    ({"token": "t" * 32}, "token: must be bytes, is str"),
    ({"token": _TOKEN[:15]}, "token: has 15 bytes"),
    ({"token": _TOKEN, "timeout": float("nan")}, "timeout=nan"),
    ({"token": _TOKEN, "timeout": -1}, "timeout=-1"),
  ],
)
def test_what_is_agreed_is_checked(agreed, line):
  with pytest.raises(UserError, match=line):
    three_programs.Agreed(**agreed)
