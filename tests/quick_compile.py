"""Compiles what tests run in less than half the time, where that is all that they need.

`JAX_DISABLE_MOST_OPTIMIZATIONS` asks XLA for no optimisations. On CPUs its newest code generator
(fusion emitters, in MLIR) and its split of a program into 32 modules still take most of the time
that the small programs of tests take to compile. Without them a program means the same; last bits
may differ. Packages that `conftest` compiles as users' programs are left as they are.

Each program is written in an MLIR context of its own, and to make one takes a fifth of the
processor time of these tests. Here a hundred programs share one; their text is the same.
"""

import contextlib
import functools
import itertools

import jax
import jaxlib
from jax._src import compiler  # nothing public reaches operations outside `jax.jit`
from jax._src.interpreters import mlir

_FLAGS = {"xla_cpu_parallel_codegen_split_count": 1}
if tuple(map(int, jaxlib.__version__.split(".")[:2])) < (0, 11):
  # Later versions have no other code generator.
  _FLAGS = {"xla_cpu_use_fusion_emitters": False, **_FLAGS}


def xla_flags(devices: int) -> str:
  """XLA_FLAGS of a program that `install`s nothing, for so many devices made of a CPU."""
  flags = {"xla_force_host_platform_device_count": devices} | _FLAGS
  return " ".join(f"--{name}={value}".lower() for name, value in flags.items())


@contextlib.contextmanager
def quickly():
  """Compiles so what is new inside: float64 for an oracle, whose roundings nobody sees.

  It must not run again outside: JAX does not tell programs of the two ways apart.
  """
  before = jax.config.read("jax_disable_most_optimizations")
  jax.config.update("jax_disable_most_optimizations", True)
  try:
    yield
  finally:
    jax.config.update("jax_disable_most_optimizations", before)


def install() -> None:
  """Has this process, and those that it forks, compile so while optimisations are off."""
  _share_contexts()
  made = getattr(compiler, "get_compile_options", None)
  if made is None or getattr(made, "quick", False):
    return

  @functools.wraps(made)
  def options(*args, env_options_overrides=None, **kwargs):
    asked = env_options_overrides
    # A compiler of another platform, also of one that is not here, may refuse these flags.
    is_here = getattr(kwargs.get("backend"), "platform", None) == "cpu"
    if jax.config.read("jax_disable_most_optimizations") and is_here:
      asked = _FLAGS | (asked or {})
    return made(*args, env_options_overrides=asked, **kwargs)

  # dpjax asks whose code a run calls: this stands for a function of JAX.
  file = made.__code__.co_filename
  options.__code__ = options.__code__.replace(co_filename=file)
  options.quick = True
  compiler.get_compile_options = options


_PROGRAMS_PER_CONTEXT = 100  # it keeps the constants of its programs


def _share_contexts() -> None:
  made = getattr(mlir, "make_ir_context", None)
  if made is None or getattr(made, "shared", False):
    return
  asked, kept = itertools.count(), [None]

  @functools.wraps(made)
  def context():
    # What JAX computes while this thread writes a program is a program apart.
    if mlir.ir.Context.current is not None:
      return made()
    if next(asked) % _PROGRAMS_PER_CONTEXT == 0 or kept[0] is None:
      kept[0] = made()
    return kept[0]

  context.shared = True
  mlir.make_ir_context = context
