"""SPU with parties in separate processes, each of which holds only its own data.

Every party runs the same program. In it the party gives its own arrays, and the shapes of the
others' arrays:

    hosts, own = ["10.0.0.1:7001", "10.0.0.2:7001"], Certificates("b.pem", "b.key", "ca.pem")
    with spu_parties.connect(hosts, 1, protocol="CHEETAH", certificates=own) as us:
      shape = jax.ShapeDtypeStruct
      w = us.run(step, shape((30,), "float32"), x, y, owners=(0, 1, 1), reveal_to=(1,))

A party splits its arrays into shares and sends each of the others one; plain data never leave
it. It learns the others' shapes, the program, and what is revealed to it. This holds if all
parties follow the protocol and no more collude than it allows (table of `spu_jit`). Seeds and
shares cross the wires, so beyond one machine they must be encrypted: every party has a
certificate, and accepts only those that the common authority signed.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import pathlib
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from dpjax import validate
from dpjax.secure.mpc import spu_jit, spu_program
from dpjax.validate import UserError


class Certificates(NamedTuple):
  """Paths of PEM files that identify a party; TLS works in both directions."""

  own: str  # certificate of this party, for the host name or address that the others use
  key: str  # private key of this party's certificate
  authority: str  # certificate of the authority that signed all parties' certificates


class SpuParty(NamedTuple):
  """A party of SPU that is connected to the others.

  All parties make the same calls.
  """

  link: Any
  rank: int
  protocol: str
  parties: int

  def run(
    self,
    fn: Callable,
    *args: Any,
    owners: Sequence[int],
    reveal_to: Sequence[int],
  ) -> Any:
    """Computes `fn` of all parties' arguments on shares. All parties must make the same
    call.

    Args:
      fn: function as for `spu_jit.secure_jit`. The parties check that all run the same function.
      *args: trees of arrays for this party's own arguments, trees of `jax.ShapeDtypeStruct` for
        the others' arguments.
      owners: for each argument, the party that has it.
      reveal_to: the parties that learn the outputs.

    Returns:
      NumPy arrays at a party in `reveal_to`, elsewhere `jax.ShapeDtypeStruct`.

    Raises UserError if arrays of another party are given, if the parties do not agree on shapes or
    program, or if a peer is silent for too long.
    """
    self._check(args, owners, reveal_to)
    leaves, in_tree = jax.tree.flatten(args)
    of_leaf = [o for o, arg in zip(owners, args) for _ in jax.tree.leaves(arg)]
    values = [
      spu_program.as_input(f"args[{i}]", leaf) if owner == self.rank else _shape(i, leaf)
      for i, (leaf, owner) in enumerate(zip(leaves, of_leaf))
    ]
    structs = tuple(jax.ShapeDtypeStruct(v.shape, v.dtype) for v in values)
    program = spu_program.compile_program(fn, structs, in_tree, (False,) * len(structs))
    config = spu_jit.runtime_config(self.protocol)
    with spu_program.one_line():
      # Programs are compared before any share is sent: another program could reveal other values.
      self._agree(program.text, self.protocol, tuple(of_leaf), tuple(reveal_to))
      party_shares = self._exchange(config, values, of_leaf)
      results = spu_jit.run_party(self.link, config, program, party_shares)
      shares = [self._collect(result, reveal_to) for result in results]
      self._leave()
    if self.rank not in reveal_to:
      return jax.tree.unflatten(program.out_tree, program.outputs)
    outputs = [
      spu_jit.join_shares(config, all_of, leaf.shape, leaf.dtype)
      for all_of, leaf in zip(shares, program.outputs)
    ]
    return jax.tree.unflatten(program.out_tree, outputs)

  def _check(self, args: Sequence, owners: Sequence[int], reveal_to: Sequence[int]) -> None:
    if len(owners) != len(args):
      raise UserError(
        f"must name a party for each of {len(args)}", field="owners", value=tuple(owners)
      )
    for name, ranks in (("owners", owners), ("reveal_to", reveal_to)):
      for rank in ranks:
        validate.integer_in(0, self.parties - 1, **{name: rank})
    if not reveal_to:
      raise UserError(
        "must name a party, or nobody would learn the result", field="reveal_to", value=()
      )
    for index, (arg, owner) in enumerate(zip(args, owners)):
      holds_values = (not isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(arg))
      if owner == self.rank or not any(holds_values):
        continue
      raise UserError(
        f"is party {owner}'s, party {self.rank} gave values, which nobody would "
        "read: give jax.ShapeDtypeStruct",
        field=f"args[{index}]",
      )

  def _others(self) -> list[int]:
    return [rank for rank in range(self.parties) if rank != self.rank]

  def _agree(self, *facts: Any) -> None:
    """Raises UserError unless program, protocol, owners and reveal_to are equal in all parties."""
    mine = hashlib.sha256(repr(facts).encode()).digest()
    for rank in self._others():
      self.link.send_async(rank, mine)
    different = [rank for rank in self._others() if self.link.recv(rank) != mine]
    if different:
      raise UserError(
        f"party {different[0]} runs another program, or other shapes, owners or "
        f"reveal_to, than party {self.rank}; nothing was shared",
        field="run",
      )

  def _exchange(self, config: Any, values: Sequence, of_leaf: Sequence[int]) -> list:
    """Sends shares of this party's inputs. Returns its share of every input."""
    received = []
    for value, owner in zip(values, of_leaf):
      if owner != self.rank:
        received.append(_read(self.link.recv(owner)))
        continue
      shares = spu_jit.split(config, self.parties, value, public=False)
      for rank in self._others():
        self.link.send_async(rank, _serialise(shares[rank]))
      received.append(shares[self.rank])
    return received

  def _leave(self) -> None:
    """Waits for all: a party that left at once might lose messages that it has not sent
    yet."""
    for rank in self._others():
      self.link.send_async(rank, b"done")
    for rank in self._others():
      self.link.recv(rank)

  def _collect(self, result: Any, reveal_to: Sequence[int]) -> list:
    """Sends this party's share of an output to the parties that learn the output.

    Returns the shares of all parties if this party learns the output, else [].
    """
    for rank in set(reveal_to) - {self.rank}:
      self.link.send_async(rank, _serialise(result))
    if self.rank not in reveal_to:
      return []
    others = {rank: _read(self.link.recv(rank)) for rank in self._others()}
    return [others.get(rank, result) for rank in range(self.parties)]


@contextlib.contextmanager
def connect(
  addresses: Sequence[str],
  rank: int,
  *,
  protocol: str = "ABY3",
  certificates: Certificates | None = None,
  trusted_dealer: bool = False,
  timeout_seconds: int = 120,
) -> Iterator[SpuParty]:
  """Context that connects party `rank` to the others by TCP. The link closes two seconds after the
  end of the block.

  Args:
    addresses: "host:port" of every party, this one included. All parties give the same list.
    protocol: ABY3 (three parties) or CHEETAH (two). SEMI2K only with `trusted_dealer`.
    certificates: certificates of this party; None only if all addresses are of this machine.
    trusted_dealer: True allows SEMI2K, where party 0 deals the triples and could open
      everything.
    timeout_seconds: longest time in seconds that another party may be missing or silent, even
      while it computes.

  Raises UserError for arguments that do not fit, or a party that does not connect.

  >>> with connect(["localhost:1", "localhost:2"], 0, protocol="SEMI2K"):
  ...   pass
  Traceback (most recent call last):
  ...
  dpjax.validate.UserError: protocol='SEMI2K': party 0 deals its triples and could open ...
  """
  parties = spu_jit.checked_parties(protocol, len(addresses))
  validate.integer_in(0, parties - 1, rank=rank)
  validate.integer_at_least(1, timeout_seconds=timeout_seconds)
  if protocol == "SEMI2K" and not trusted_dealer:
    raise UserError(
      "party 0 deals its triples and could open everything; must be ABY3 or "
      "CHEETAH, or trusted_dealer=True",
      field="protocol",
      value="SEMI2K",
    )
  link = spu_program.library().link
  desc = spu_jit.description(link, addresses, timeout_seconds)
  _encrypt(desc, addresses, certificates)
  # The others may start to listen later, so connecting is tried repeatedly.
  desc.connect_retry_interval_ms = 200
  desc.connect_retry_times = math.ceil(timeout_seconds / _ATTEMPT_SECONDS)
  try:
    party_link = link.create_brpc(desc, rank)
  except RuntimeError as error:
    raise UserError(
      f"no connection of all parties within {timeout_seconds} s at {list(addresses)}",
      field="addresses",
    ) from error
  try:
    yield SpuParty(party_link, rank, protocol, parties)
  finally:
    # The others may still be reading this party's last message, so the link stays open.
    time.sleep(_LINGER_SECONDS)


def _encrypt(
  desc: Any, addresses: Sequence[str], certificates: Certificates | None
) -> None:
  """Sets TLS. Raises UserError for a missing file, or if there are no certificates for
  addresses beyond this machine."""
  if certificates is None:
    beyond = [at for at in addresses if at.rpartition(":")[0] not in _THIS_MACHINE]
    if beyond:
      raise UserError(
        f"{beyond[0]} is another machine, and seeds and shares would cross the "
        "network in the clear: give Certificates",
        field="certificates",
        value=None,
      )
    return
  for name, path in certificates._asdict().items():
    if not pathlib.Path(path).is_file():
      raise UserError("no such file", field=f"certificates.{name}", value=path)
  desc.enable_ssl = True
  for options in (desc.client_ssl_opts, desc.server_ssl_opts):
    options.cert.certificate_path = str(certificates.own)
    options.cert.private_key_path = str(certificates.key)
    options.verify.ca_file_path = str(certificates.authority)
    options.verify.verify_depth = 1


# Seconds from the end of the block until the link is closed. SPU answers other parties until then,
# and it ends the process of a party whose message got no answer. SPU's own final handshake closes
# too early (TLS: in 4 of 14 runs on a busy machine), and waits for ever for a lost party. After
# `_leave` only answers are still on their way.
_LINGER_SECONDS = 2.0
# Seconds of one attempt to connect: SPU tries four times in it, with waits of 1, 3 and 5 seconds.
_ATTEMPT_SECONDS = 9
_THIS_MACHINE = ("127.0.0.1", "localhost")


def _shape(index: int, leaf: Any) -> Any:
  spu_program.check_dtype(f"args[{index}]", leaf.dtype)
  return leaf


def _serialise(share: Any) -> bytes:
  """Serialises a share: the number of parts, their lengths, the parts."""
  parts = [share.meta, *share.share_chunks]
  return struct.pack(f"<{len(parts) + 1}Q", len(parts), *map(len, parts)) + b"".join(parts)


def _read(message: bytes) -> Any:
  """Parses another party's share. Raises UserError for malformed bytes."""
  wrong = UserError("another party sent what is no share; it runs other code", field="run")
  if len(message) < 16:
    raise wrong
  (count,) = struct.unpack_from("<Q", message)
  start = 8 * (count + 1)
  # The count is checked before the lengths are read, since a peer may claim any number.
  if not 1 <= count <= len(message) // 8 - 1:
    raise wrong
  lengths = struct.unpack_from(f"<{count}Q", message, 8)
  if start + sum(lengths) != len(message):
    raise wrong
  share = spu_program.library().libspu.Share()
  parts = []
  for length in lengths:
    parts.append(message[start : start + length])
    start += length
  share.meta = parts[0]
  share.share_chunks = parts[1:]
  return share
