"""Records what every key of JAX is used for while a run goes on, also in compiled programs.

Each function of `jax.random` that takes a key is wrapped. A wrapper knows where it was called, and
its values come from the running program by a callback.
"""

import collections
import contextlib
import functools
import inspect
import sys
from unittest import mock

import jax
import numpy as np

from dpjax import jaxprs, key_uses

# Where noise is made of words: a use is named by who asked for the noise.
_INSIDE = ("jax", "dpjax.key_uses", "dpjax.noise.source")
_INSIDE += ("dpjax.noise.distributions", "tests.key_recorder", "functools", "contextlib")


class Record:
  """Uses of keys: who made each key, who drew from it, and how often."""

  def __init__(self):
    self.made = collections.defaultdict(set)  # words of a key -> {who made it}
    self.drawn = collections.Counter()  # (words, who drew) -> number of draws
    self.parents = collections.defaultdict(set)  # words -> {who made other keys of it}
    self._within = []  # draws that are being made

  def reused(self):
    """Lines that say which keys have two uses; empty if no key has."""
    lines = []
    draws = collections.defaultdict(set)
    for words, who in self.drawn:
      draws[words].add(who)
    for makers in self.made.values():
      if len(makers) > 1:
        lines.append(f"one key is made by {sorted(makers)}")
    for words, who in draws.items():
      if len(who) > 1:
        lines.append(f"one key is drawn from by {sorted(who)}")
      if words in self.parents:
        lines.append(
          f"{sorted(who)} draws from a key of which {self.parents[words]} makes keys"
        )
    return sorted(set(lines))

  def noise_drawn_twice(self):
    """Who drew noise from one key more than once."""
    return sorted({who for (_, who), n in self.drawn.items() if n > 1 and _is_noise(who)})

  def deriving(self, original):
    """`original`, a function that makes keys of a key, recorded."""

    @functools.wraps(original)
    def wrapper(key, *args, **kwargs):
      children = original(key, *args, **kwargs)
      who, inside = _caller()

      def note(parent, words):
        for each in _each(words):
          self.made[each].add(who)
        # The tails of noise come from a key of the noise's own key.
        if not inside:
          for each in _each(parent):
            self.parents[each].add(who)

      if who and _is_typed(key):
        _tell(note, key, children)
      return children

    return wrapper

  def drawing(self, original):
    """`original`, a function that draws random numbers from a key, recorded."""

    @functools.wraps(original)
    def wrapper(key, *args, **kwargs):
      # One draw may be made by another.
      if _is_typed(key) and not self._within:
        who, _ = _caller()
        _tell(lambda words: self.drawn.update((each, who) for each in _each(words)), key)
      self._within.append(original)
      try:
        return original(key, *args, **kwargs)
      finally:
        self._within.pop()

    return wrapper


def _is_noise(who):
  return who.startswith(("dpjax.noise", "dpjax.mechanisms"))


def _caller():
  """(who calls: module and line of the first frame that is no tool; whether noise calls)."""
  frame, inside = sys._getframe(2), False
  while frame is not None:
    name = frame.f_globals.get("__name__", "")
    # It makes keys to compare them with another.
    if frame.f_code.co_name == "is_key_of_noise":
      return None, inside
    use = frame.f_locals.get("use")
    if name == key_uses.__name__ and isinstance(use, key_uses.KeyUse):
      return f"KeyUse.{use.name}", False
    inside = inside or name.startswith("dpjax.noise.")
    if not any(name == each or name.startswith(each + ".") for each in _INSIDE):
      return f"{name}:{frame.f_lineno}", inside
    frame = frame.f_back
  return "?", inside


def _each(words):
  """Words of every key of an array of keys, as bytes."""
  words = np.asarray(words)
  return [row.tobytes() for row in words.reshape(-1, words.shape[-1])]


def _tell(fn, *keys):
  """Calls fn(words of each key), now or where the program runs."""
  words = [jax.random.key_data(key) for key in keys]
  if any(isinstance(each, jax.core.Tracer) for each in words):
    jax.debug.callback(fn, *words)
  else:
    fn(*words)


def _is_typed(key):
  if not jax.numpy.issubdtype(getattr(key, "dtype", None), jax.dtypes.prng_key):
    return False
  # The generator of ordinary keys calls that of JAX for a use that is recorded already.
  return jax.random.key_impl(key) != "threefry4x32"


def _wrapped(record):
  """(module, name, function in its place) of all that is wrapped."""
  for name, function in vars(jax.random).items():
    takes = inspect.isfunction(function) or hasattr(function, "__wrapped__")
    first = next(iter(inspect.signature(function).parameters), "") if takes else ""
    if name in ("fold_in", "split"):
      yield jax.random, name, record.deriving(function)
    elif first == "key" and name not in ("key_data", "key_impl", "clone"):
      yield jax.random, name, record.drawing(function)
  # Public losses may not call back into Python; the recorder's own calls read keys alone.
  primitives = jaxprs.primitives
  others = lambda jaxpr: (name for name in primitives(jaxpr) if name != "debug_callback")
  yield jaxprs, "primitives", others


@contextlib.contextmanager
def recording():
  """Yields the `Record` of everything that is drawn inside of the block."""
  record = Record()
  # Programs that are compiled already record nothing.
  jax.clear_caches()
  with contextlib.ExitStack() as patches:
    for where, name, value in [*_wrapped(record)]:
      patches.enter_context(mock.patch.object(where, name, value))
    yield record
    jax.effects_barrier()
  jax.clear_caches()
