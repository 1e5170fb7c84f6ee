"""SPU's parties as processes of their own, each with its own data alone."""

import concurrent.futures
import datetime
import importlib.util
import ipaddress
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
from tests.refuses import refuses
from tests.secure.mpc import spu_party

x509 = pytest.importorskip("cryptography.x509", reason="needs the extra 'secure'")
hashes = pytest.importorskip("cryptography.hazmat.primitives.hashes")
serialization = pytest.importorskip("cryptography.hazmat.primitives.serialization")
ec = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.ec")

if importlib.util.find_spec("spu") is None:
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


def _certificate(name, key, signer=None):
  """Of a party, signed by (authority, its key); of an authority where there is no signer."""
  named = x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, name)])
  day, now = datetime.timedelta(days=1), datetime.datetime.now(datetime.UTC)
  host = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
  made = x509.CertificateBuilder().subject_name(named).public_key(key.public_key())
  made = made.issuer_name(signer[0].subject if signer else named)
  made = made.serial_number(x509.random_serial_number())
  made = made.not_valid_before(now - day).not_valid_after(now + day)
  made = made.add_extension(x509.BasicConstraints(ca=not signer, path_length=None), True)
  if signer:
    made = made.add_extension(host, False)
  return made.sign(signer[1] if signer else key, hashes.SHA256())


def _certificates(folder, parties):
  """[own, key, authority] of each party, as files of one authority."""
  new_key = lambda: ec.generate_private_key(ec.SECP256R1())
  kind = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
  folder.mkdir(exist_ok=True)
  root = new_key()
  authority = _certificate("authority", root)
  (folder / "ca.pem").write_bytes(authority.public_bytes(kind[0]))
  files = []
  for rank in range(parties):
    key, own = new_key(), [str(folder / f"{rank}.{end}") for end in ("pem", "key")]
    made = _certificate(f"party {rank}", key, (authority, root))
    pathlib.Path(own[0]).write_bytes(made.public_bytes(kind[0]))
    plain = key.private_bytes(*kind, serialization.NoEncryption())
    pathlib.Path(own[1]).write_bytes(plain)
    files.append([*own, str(folder / "ca.pem")])
  return files


def _run(parties, **task):
  """What each party prints, every one a process."""
  task = {"addresses": _addresses(parties), "certificates": None, **task}
  command = [sys.executable, "-m", "tests.secure.mpc.spu_party"]
  started = [
    subprocess.Popen(
      [*command, json.dumps({**task, "rank": rank})],
      cwd=_ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
      env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    for rank in range(parties)
  ]  # fmt: skip
  try:
    outputs = [one.communicate(timeout=120) for one in started]
  finally:
    for one in started:
      one.kill()
      one.wait()
  lines = [
    [w for w in out.splitlines() if w[:5] in ("RESUL", "ERROR")] for out, _ in outputs
  ]
  assert all(len(own) == 1 for own in lines), [err[-2000:] for _, err in outputs]
  return [own[0] for own in lines]


@pytest.mark.long
def test_three_processes_over_tls_and_one_of_them_learns_the_result(tmp_path):
  files = _certificates(tmp_path, 3)
  lines = _run(3, protocol="ABY3", reveal_to=[1], certificates=files)
  assert lines[0] == lines[2] == 'RESULT "(5,) float32"'
  got = np.array(json.loads(lines[1].removeprefix("RESULT ")))
  assert np.abs(got - spu_party.step(spu_party.data(0), spu_party.data(1))).max() < 2e-4


_LEAVES = """
import json, sys
from dpjax.secure.mpc import spu_parties
addresses, rank = json.loads(sys.argv[1])
with spu_parties.connect(addresses, rank, protocol="CHEETAH", timeout_seconds=60):
  print("connected", flush=True)
  sys.stdin.readline()
print("left")
"""


@pytest.mark.long
def test_who_leaves_waits_for_nobody_who_is_gone():
  addresses, pipe = _addresses(2), subprocess.PIPE
  command = lambda rank: [sys.executable, "-c", _LEAVES, json.dumps([addresses, rank])]
  both = [
    subprocess.Popen(command(rank), cwd=_ROOT, stdin=pipe, stdout=pipe, text=True)
    for rank in range(2)
  ]
  try:
    connected = [one.stdout.readline() for one in both]
    both[1].kill()
    out, _ = both[0].communicate("leave\n", timeout=60)
  finally:
    for one in both:
      one.kill()
      one.communicate()
  assert connected == ["connected\n"] * 2
  assert both[0].returncode == 0 and "left" in out


@pytest.mark.long
def test_a_party_whose_certificate_another_authority_signed_is_left_out(tmp_path):
  files = _certificates(tmp_path / "ours", 2)
  files[1][:2] = _certificates(tmp_path / "theirs", 2)[1][:2]
  lines = _run(2, protocol="CHEETAH", reveal_to=[0], certificates=files, timeout=5)
  assert all(line.startswith("ERROR addresses: no connection") for line in lines), lines


def test_wires_beyond_this_machine_need_certificates():
  hosts = ["10.0.0.1:7001", "10.0.0.2:7001"]
  with (
    refuses("certificates", value=None),
    spu_parties.connect(hosts, 0, protocol="CHEETAH"),
  ):
    pass
  files = spu_parties.Certificates("none.pem", "none.key", "none.pem")
  with (
    refuses("certificates.own", value="none.pem"),
    spu_parties.connect(hosts, 0, protocol="CHEETAH", certificates=files),
  ):
    pass


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
  with refuses("args[1]"):
    us.run(add, x, x, owners=(0, 1), reveal_to=(0,))
  with refuses("owners", value=3):
    us.run(add, x, shape, owners=(0, 3), reveal_to=(0,))
  with refuses("reveal_to"):
    us.run(add, x, shape, owners=(0, 1), reveal_to=())
  with refuses("owners"):
    us.run(add, x, shape, owners=(0,), reveal_to=(0,))


def test_a_share_survives_its_bytes_and_noise_does_not():
  config = spu_jit.runtime_config("ABY3")
  x = np.arange(6, dtype=np.float32).reshape(2, 3)
  messages = [spu_parties._serialise(s) for s in spu_jit.split(config, 3, x, False)]
  shares = [spu_parties._read(message) for message in messages]
  assert (spu_jit.join_shares(config, shares, (2, 3), np.float32) == x).all()
  for wrong in (b"", messages[0][:-1], messages[0] + b"0", b"\xff" * 64, b"\0" * 64):
    with refuses("run"):
      spu_parties._read(wrong)
