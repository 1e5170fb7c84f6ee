"""SPU's parties as processes of their own, each with its own data alone."""

import concurrent.futures
import json
import os
import pathlib
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest

from dpjax.secure.mpc import spu_jit, spu_parties, spu_program
from dpjax.validate import UserError
from tests.secure.mpc import spu_party

if spu_program.missing():
  pytest.skip(f"needs spu: {spu_program.INSTALL}", allow_module_level=True)

_ROOT = pathlib.Path(__file__).resolve().parents[3]


def _addresses(count):
  sockets = [socket.socket() for _ in range(count)]
  for one in sockets:
    one.bind(("127.0.0.1", 0))
  ports = [one.getsockname()[1] for one in sockets]
  for one in sockets:
    one.close()
  return [f"127.0.0.1:{port}" for port in ports]


def _run(parties, **task):
  """What each party prints, every one a process."""
  task["addresses"] = _addresses(parties)
  command = [sys.executable, "-m", "tests.secure.mpc.spu_party"]
  started = [
    subprocess.Popen(
      [*command, json.dumps({**task, "rank": rank})],
      cwd=_ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
      env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    for rank in range(parties)
  ]  # fmt: skip
  outputs = [one.communicate(timeout=120) for one in started]
  lines = [
    [w for w in out.splitlines() if w[:5] in ("RESUL", "ERROR")] for out, _ in outputs
  ]
  assert all(len(own) == 1 for own in lines), outputs
  return [own[0] for own in lines]


def test_three_processes_and_one_of_them_learns_the_result():
  lines = _run(3, protocol="ABY3", reveal_to=[1])
  assert lines[0] == lines[2] == 'RESULT "(5,) float32"'
  got = np.array(json.loads(lines[1].removeprefix("RESULT ")))
  assert np.abs(got - spu_party.step(spu_party.data(0), spu_party.data(1))).max() < 2e-4


def _threads(parties, task):
  """`task(party)` of each party, on threads that are connected as processes would be."""
  link = spu_program.library().link
  names = [f"{task}{rank}" for rank in range(parties)]

  def one(rank):
    own = link.create_mem(spu_jit.description(link, names), rank)
    try:
      return task(spu_parties.SpuParty(own, rank, "SEMI2K", parties))
    except UserError as error:
      return str(error)

  with concurrent.futures.ThreadPoolExecutor(parties) as pool:
    return list(pool.map(one, range(parties)))


def _own(us, args, owners):
  """The arguments as a party has them."""
  shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in args]
  held = zip(args, shapes, owners)
  return [arg if owner == us.rank else shape for arg, shape, owner in held]


def test_programs_that_differ_share_nothing():
  x, owners = np.ones(3, np.float32), (0, 1)
  programs = [lambda a, b: a + b, lambda a, b: a - b]
  lines = _threads(
    2,
    lambda us: us.run(
      programs[us.rank], *_own(us, (x, x), owners), owners=owners, reveal_to=(0,)
    ),
  )
  assert all(
    "runs another program" in line and "nothing was shared" in line for line in lines
  )


def test_a_broken_peer_is_one_line():
  x = np.ones(3, np.float32)

  def task(us):
    if us.rank == 1:
      us.link.send_async(0, us.link.recv(0))  # agrees to everything
      us.link.recv(0)
      us.link.send_async(0, b"no share at all" * 9)
      return "sent"
    args = _own(us, (x, x), (0, 1))
    return us.run(lambda a, b: a + b, *args, owners=(0, 1), reveal_to=(0,))

  assert "another party sent what is no share" in _threads(2, task)[0]


def test_everybody_may_learn_the_result():
  x, y = np.float32([1, 2, 3]), np.float32([4, 5, 6])
  task = lambda us: us.run(
    lambda a, b: a * b, *_own(us, (x, y), (0, 1)), owners=(0, 1), reveal_to=(1, 0)
  )
  for got in _threads(2, task):
    assert np.abs(got - x * y).max() < 1e-3


@pytest.mark.long
def test_two_processes_without_a_dealer():
  lines = _run(2, protocol="CHEETAH", reveal_to=[0, 1])
  assert lines[0] == lines[1]
  got = np.array(json.loads(lines[1].removeprefix("RESULT ")))
  assert np.abs(got - spu_party.step(spu_party.data(0), spu_party.data(1))).max() < 1e-3


def test_terms_are_checked_before_anything_is_sent():
  us = spu_parties.SpuParty(link=None, rank=0, protocol="ABY3", parties=3)
  x, shape = np.ones(3, np.float32), jax.ShapeDtypeStruct((3,), np.float32)
  add = lambda a, b: a + b
  with pytest.raises(UserError, match=r"args\[1\]: is party 1's, party 0 gave values"):
    us.run(add, x, x, owners=(0, 1), reveal_to=(0,))
  with pytest.raises(UserError, match=r"owners=3: must be an integer in \[0, 2\]"):
    us.run(add, x, shape, owners=(0, 3), reveal_to=(0,))
  with pytest.raises(UserError, match="reveal_to=\\(\\): must name a party"):
    us.run(add, x, shape, owners=(0, 1), reveal_to=())
  with pytest.raises(UserError, match="owners=\\(0,\\): must name a party for each of 2"):
    us.run(add, x, shape, owners=(0,), reveal_to=(0,))


def test_a_share_survives_its_bytes_and_noise_does_not():
  config = spu_jit.runtime_config("ABY3")
  x = np.arange(6, dtype=np.float32).reshape(2, 3)
  messages = [spu_parties._written(s) for s in spu_jit.split(config, 3, x, False)]
  shares = [spu_parties._read(message) for message in messages]
  assert (spu_jit.joined(config, shares, (2, 3), np.float32) == x).all()
  for wrong in (b"", messages[0][:-1], messages[0] + b"0", b"\xff" * 64, b"\0" * 64):
    with pytest.raises(UserError, match="sent what is no share"):
      spu_parties._read(wrong)
