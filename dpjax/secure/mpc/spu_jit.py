"""JAX functions on secret inputs, unmodified: SPU runs their StableHLO on shares.

    step = secure_jit(train_step, protocol="ABY3")  # train_step: JAX, jax.grad and all
    params = step(params, x, y)  # computed on shares, then put together

Here all parties are threads of ONE process, which also makes the shares and puts the result
together. The protocol's messages, sizes and rounding are real, but the secrecy is a simulation.
`spu_parties` does the same with a process for each party.

| protocol  | parties | hides the inputs from                                              |
| --------- | ------- | ------------------------------------------------------------------ |
| `SEMI2K`  | 2 to 8  | all parties but the first. In this release of SPU the first party  |
|           |         | deals the triples, and could open everything                       |
| `ABY3`    | 3       | each party alone; two of them together can open everything         |
| `CHEETAH` | 2       | each of the two, by oblivious transfer and encryption; no dealer   |

This holds for parties that follow the protocol. They learn the program (with every number in it),
the shapes, and what is revealed. The caller decides whether an output is revealed. It may tell
about the inputs, and nothing here is differentially private.
Source: Ma et al. 2023, SecretFlow-SPU, USENIX ATC; Mohassel and Rindal 2018 (ABY3);
Huang et al. 2022 (Cheetah).
"""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import pathlib
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from dpjax import validate
from dpjax.secure.mpc import spu_program
from dpjax.validate import UserError

PROTOCOLS = {  # name -> numbers of parties
  "SEMI2K": range(2, 9),
  "ABY3": range(3, 4),
  "CHEETAH": range(2, 3),
}
_RUNS = itertools.count()
# Seconds to wait for a message of another party, which may compute first.
TIMEOUT_SECONDS = 600


@dataclasses.dataclass(frozen=True)
class Secret:
  """An array of which each party holds a share; a leaf in trees of arguments and results.

  It is made by `share`, or by a `SecureFunction` with revealed=False. Fewer than all shares say
  nothing about the values; but in ABY3 two of the three say all. Shape and type are public.
  """

  shape: tuple[int, ...]
  dtype: np.dtype
  protocol: str
  shares: tuple[Any, ...] = dataclasses.field(repr=False)  # SPU's, one for each party


class Measured(NamedTuple):
  """Outputs of a function, and their cost for all parties together."""

  outputs: Any
  input_bytes: int  # shares of the inputs, as they would be sent to the parties
  run_bytes: int  # sent between the parties while they computed, as SPU counts it
  seconds: float  # of the computation, on threads of this process


@dataclasses.dataclass(frozen=True)
class SecureFunction:
  """Result of `secure_jit`: a function that runs on shares."""

  fn: Callable
  protocol: str
  parties: int
  public_argnums: tuple[int, ...]
  revealed: bool

  def __call__(self, *args: Any) -> Any:
    """Returns the outputs of `fn`: NumPy arrays, or `Secret` if `revealed` is False.

    Args:
      *args: trees of arrays (float32, bool, integers up to 32 bits), numbers, `Secret`.

    Raises UserError for a type, a number or an operation that SPU does not take.
    """
    return self._run(args, profile=False)[0]

  def measured(self, *args: Any) -> Measured:
    """Returns the outputs of `fn` as a call does, with bytes and seconds."""
    with _count_bytes(self.parties) as count:
      outputs, sent, seconds = self._run(args, profile=True)
    return Measured(outputs, sent, count[0], seconds)

  def _run(self, args: tuple, profile: bool) -> tuple[Any, int, float]:
    leaves, in_tree = jax.tree.flatten(args)
    public = public_leaves(args, self.public_argnums)
    values = [self._admit(f"args[{i}]", leaf) for i, leaf in enumerate(leaves)]
    structs = tuple(jax.ShapeDtypeStruct(v.shape, v.dtype) for v in values)
    program = spu_program.compile_program(self.fn, structs, in_tree, public)
    config = runtime_config(self.protocol, profile)
    of_party = self._shares(config, values, public)
    start = time.perf_counter()
    with (
      spu_program.one_line(),
      concurrent.futures.ThreadPoolExecutor(self.parties) as pool,
    ):
      # Each call has its own channel, since several threads may call one function at once.
      name = next(_RUNS)
      links = pool.map(functools.partial(self._link, name), range(self.parties))
      jobs = zip(links, of_party)
      runs = [
        pool.submit(run_party, link, config, program, shares) for link, shares in jobs
      ]
      results = [run.result() for run in runs]
    seconds = time.perf_counter() - start
    outputs = [
      Secret(leaf.shape, np.dtype(leaf.dtype), self.protocol, shares)
      for leaf, shares in zip(program.outputs, zip(*results))
    ]
    tree = jax.tree.unflatten(program.out_tree, outputs)
    size = sum(num_bytes(share) for shares in of_party for share in shares)
    return reveal(tree) if self.revealed else tree, size, seconds

  def _admit(self, name: str, leaf: Any) -> Any:
    if not isinstance(leaf, Secret):
      return spu_program.as_input(name, leaf)
    shared = leaf.protocol, len(leaf.shares)
    if shared != (self.protocol, self.parties):
      raise UserError(
        f"shared for {shared[0]} among {shared[1]}; must be for "
        f"{self.protocol} among {self.parties}",
        field=name,
      )
    return leaf

  def _shares(
    self, config: Any, values: Sequence[Any], public: Sequence[bool]
  ) -> list[tuple]:
    """Returns a tuple of shares for each party, one share for each input."""
    pairs = []
    for index, (value, known) in enumerate(zip(values, public)):
      if isinstance(value, Secret) and known:
        raise UserError(
          "is a Secret; must not be in public_argnums", field=f"args[{index}]"
        )
      secret = isinstance(value, Secret)
      pairs.append(value.shares if secret else split(config, self.parties, value, known))
    return list(zip(*pairs)) if pairs else [()] * self.parties

  def _link(self, name: int, rank: int) -> Any:
    link = spu_program.library().link
    names = [f"dpjax-{name}-{other}" for other in range(self.parties)]
    return link.create_mem(description(link, names), rank)


def secure_jit(
  fn: Callable,
  *,
  protocol: str = "SEMI2K",
  parties: int | None = None,
  public_argnums: Sequence[int] = (),
  revealed: bool = True,
) -> SecureFunction:
  """Returns `fn` as a function on shares. Call it like `jax.jit(fn)`, with secret arguments.

  Args:
    fn: a JAX function of trees of arrays, pure, with shapes that do not depend on values. It may
      use `jax.grad`, `vmap` and loops of a public length. It must not use sort, random numbers,
      float64 or linear algebra beyond products. It must not close over arrays, which would be
      public.
    protocol: SEMI2K, ABY3 or CHEETAH; see the table of this module.
    parties: number of parties; None: the smallest number that the protocol allows.
    public_argnums: places of the arguments that every party may read.
    revealed: False: the outputs stay shared, as `Secret`, for later calls. So parameters need
      never be put together between the steps of a training.

  The result has the error of fixed point with 18 bits, about 2^-17 for each product. SPU's exp, log
  and division are within 2e-4, its tanh within 5e-3, and a training step within 1e-4. Products,
  and sums of them, beyond 2^(63 - 36) inside the program wrap around, without an error.

  Raises UserError for an unknown protocol, or a number of parties that it does not allow.

  >>> secure_jit(lambda x: x + 1, protocol="ABY3", parties=2)
  Traceback (most recent call last):
  ...
  dpjax.validate.UserError: parties=2: must be 3 for ABY3
  """
  return SecureFunction(
    fn, protocol, checked_parties(protocol, parties), tuple(public_argnums), revealed
  )


def checked_parties(protocol: str, parties: int | None) -> int:
  """Returns the number of parties; for None the smallest that the protocol allows.

  Raises UserError unless the protocol allows the number.
  """
  validate.one_of(PROTOCOLS, protocol=protocol)
  allowed = PROTOCOLS[protocol]
  if parties is not None and parties not in allowed:
    least = allowed[0]
    most = allowed[-1]
    bound = f"{least}" if least == most else f"{least} to {most}"
    raise UserError(f"must be {bound} for {protocol}", field="parties", value=parties)
  return allowed[0] if parties is None else parties


def share(tree: Any, *, protocol: str = "SEMI2K", parties: int | None = None) -> Any:
  """Returns the tree with a `Secret` for each array: shared once, for many calls."""
  count = checked_parties(protocol, parties)
  config = runtime_config(protocol)
  leaves, structure = jax.tree.flatten(tree)
  arrays = [spu_program.as_input(f"tree[{i}]", leaf) for i, leaf in enumerate(leaves)]
  secrets = [
    Secret(a.shape, a.dtype, protocol, split(config, count, a, False)) for a in arrays
  ]
  return jax.tree.unflatten(structure, secrets)


def reveal(tree: Any) -> Any:
  """Returns the tree with every `Secret` reconstructed from all parties' shares."""

  def together(leaf: Any) -> Any:
    if not isinstance(leaf, Secret):
      return leaf
    return join_shares(runtime_config(leaf.protocol), leaf.shares, leaf.shape, leaf.dtype)

  return jax.tree.map(together, tree)


# --- shared by threads and processes


def runtime_config(protocol: str, profile: bool = False) -> Any:
  """Returns SPU's settings: a ring of 2^64, 18 fraction bits."""
  spu = spu_program.library()
  kind = spu.ProtocolKind.__members__[protocol]
  config = spu.RuntimeConfig(kind, spu.FieldType.FM64, spu_program.FRACTION_BITS)
  # The exponential is computed as a rational function. With SPU's default, a power of 1 + x / 256,
  # a softmax is wrong by 3e-3.
  config.fxp_exp_mode = spu.RuntimeConfig.ExpMode.EXP_PADE
  # The profile writes the number of sent bytes to the log; SPU reports it nowhere else.
  config.enable_pphlo_profile = profile
  return config


def description(link: Any, names: Sequence[str], timeout: int = TIMEOUT_SECONDS) -> Any:
  """Returns SPU's description of the parties, in order, with a timeout for each message."""
  desc = link.Desc()
  desc.recv_timeout_ms = 1000 * timeout
  for rank, name in enumerate(names):
    desc.add_party(f"party{rank}", name)
  return desc


def split(config: Any, parties: int, array: np.ndarray, public: bool) -> tuple[Any, ...]:
  """Splits an array into shares with SPU's own randomness; copies it if it is public."""
  spu = spu_program.library()
  kind = spu.Visibility.VIS_PUBLIC if public else spu.Visibility.VIS_SECRET
  with spu_program.one_line():
    return tuple(spu.Io(parties, config).make_shares(array, kind))


def join_shares(config: Any, shares: Sequence[Any], shape: tuple, dtype: Any) -> np.ndarray:
  """Returns the array that the shares of all parties represent."""
  with spu_program.one_line():
    array = spu_program.library().Io(len(shares), config).reconstruct(list(shares))
  return np.asarray(array).astype(dtype, copy=False).reshape(shape)


def run_party(
  link: Any, config: Any, program: spu_program.SpuProgram, shares: Sequence
) -> tuple:
  """Runs one party: takes its shares of the inputs, returns its shares of the outputs."""
  spu = spu_program.library()
  runtime = spu.Runtime(link, config)
  inputs = [f"in{i}" for i in range(len(shares))]
  outputs = [f"out{i}" for i in range(len(program.outputs))]
  for name, value in zip(inputs, shares):
    runtime.set_var(name, value)
  runtime.run(spu.Executable("dpjax", inputs, outputs, program.code))
  return tuple(map(runtime.get_var, outputs))


def public_leaves(args: tuple, argnums: Sequence[int]) -> tuple[bool, ...]:
  """Returns one bool for each leaf of the arguments: whether it is public."""
  validate.integer_in(0, len(args) - 1, **validate.entries(public_argnums=argnums))
  counts = [len(jax.tree.leaves(arg)) for arg in args]
  return tuple(i in argnums for i, count in enumerate(counts) for _ in range(count))


def num_bytes(share: Any) -> int:
  """Returns the number of bytes of one party's share of one array, as sent."""
  return len(share.meta) + sum(map(len, share.share_chunks))


# --- SPU reports sent bytes only in its log

_LOCK = threading.Lock()
_SENT = re.compile(r"Link details: total send bytes (\d+)")


@functools.cache
def _log() -> pathlib.Path:
  """Returns the file to which SPU logs from now on: operations, times and bytes, but no values."""
  folder = tempfile.mkdtemp(prefix="dpjax-spu-")
  atexit.register(shutil.rmtree, folder, ignore_errors=True)
  logging = spu_program.library().libspu.logging
  options = logging.LogOptions()
  options.enable_console_logger = False
  options.system_log_path = f"{folder}/spu.log"
  logging.setup_logging(options)
  return pathlib.Path(options.system_log_path)


@contextlib.contextmanager
def _count_bytes(parties: int) -> Iterator[list[int]]:
  """Yields a list, which after the block holds the number of bytes that the parties sent in it."""
  count: list[int] = []
  # The process has one log, so the bytes of two calls at once could not be told apart.
  with _LOCK:
    path = _log()
    before = path.stat().st_size if path.exists() else 0
    yield count
    counts = _SENT.findall(path.read_bytes()[before:].decode())
  if len(counts) != parties:
    raise UserError(
      f"its log tells {len(counts)} counts of bytes for {parties} parties", field="spu"
    )
  count.append(sum(map(int, counts)))
