"""Gradient inversion: guessed examples are moved until they would yield the observed message.

| method       | distance                         | optimizer                | source              |
| ------------ | -------------------------------- | ------------------------ | ------------------- |
| `Dlg`        | squared, relative to the message | L-BFGS, a line search    | Zhu et al. 2019     |
| `CosineAdam` | 1 - cosine, plus total variation | Adam on signs, in a box  | Geiping et al. 2020 |

`Dlg` can find the exact input of a smooth network (sigmoid, tanh, softplus) from an unchanged
gradient, whose scale it needs. It moves along second derivatives, which vanish where activations
are piecewise linear (ReLU, leaky ReLU, max pooling). It warns of these; try `CosineAdam` then. The
cosine does not depend on a common factor, so clipping alone does not hinder it.

Every message that a view of `attacks.views` describes is attacked the same way: a mean gradient,
or what a client sends after several local steps, which are unrolled. Restarts run side by side
under vmap, or one after the other with a line search. After a short trial the best few go on. The
adversary keeps the restart whose message comes closest.

An attack that fails proves nothing: another one may succeed.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpjax import trees, validate
from dpjax.attacks import line_search
from dpjax.attacks.recovery import check_labels, check_seen
from dpjax.attacks.views import View
from dpjax.types import Array, ArrayTree, Example, HostArray
from dpjax.validate import UserError

# Without a line search, number of steps between two checks of whether a restart has converged.
_CHECK_EVERY = 25
# With a line search, a restart whose trial ends at or below this objective goes on at once.
_PROMISING = 1e-3
# `jumps`: length of the ends of its line, in first guesses; numbers of intervals, of those that are
# halved, and of halvings; smallest change that is a jump, as a share of the longest message. A
# smooth message changes by less over 1e-9 of the line. So does one in float32, by rounding.
_LONG = 3.0
_INTERVALS = 16
_TRIED = 4
_HALVINGS = 26
_JUMP = 1e-5


class Method(Protocol):
  """Interface of an inversion method, which judges and moves a guess.

  A method may have two more attributes. If `line_search` is True, SciPy's L-BFGS moves the guess,
  and keeps `memory` pairs of vectors. Then `project` clips only the first guess, and `optimizer`
  takes no step.
  """

  @property
  def steps(self) -> int: ...
  @property
  def tolerance(self) -> float: ...  # a restart at or below this objective has converged
  @property
  def float64(self) -> bool: ...

  # Raises for shapes that it cannot attack, and warns of views that it fails on.
  def check(self, view: View, guessed: Example) -> None: ...
  def objective(self, guessed: ArrayTree, seen: ArrayTree, x: Array) -> Array: ...
  def optimizer(self) -> optax.GradientTransformation: ...
  def project(self, x: Array) -> Array: ...


def _dot(a: ArrayTree, b: ArrayTree) -> Array:
  return sum(jnp.vdot(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b)))  # pyright: ignore[reportReturnType]


def _to_unit_length(tree: ArrayTree) -> ArrayTree:
  """Scales a tree to length 1; 0 stays 0."""
  square = _dot(tree, tree)
  return trees.scale(tree, jax.lax.rsqrt(jnp.maximum(square, jnp.finfo(square.dtype).tiny)))


def total_variation(x: Array) -> Array:
  """Returns the mean absolute difference of neighbouring pixels of images [B, H, W, C], vertical
  plus horizontal.

  >>> float(total_variation(jnp.array([[0.0, 1.0], [0.0, 1.0]])[None, :, :, None]))
  1.0
  """
  down = jnp.abs(jnp.diff(x, axis=1))
  right = jnp.abs(jnp.diff(x, axis=2))
  # The zero covers images of one pixel, which have no differences.
  return sum(jnp.mean(part) for part in (down, right) if part.size) + jnp.zeros(())


def jumps(view: View, guessed: Example) -> bool:
  """Returns whether a message jumps between random examples of these shapes.

  The derivative of a piecewise linear activation is constant but for jumps, and so the message
  jumps, however the activation is written. On a line between two examples, the interval where the
  message changes most is halved again and again. A change that stays is a jump.

  >>> from dpjax.attacks.views import gradient_view
  >>> shapes = Example(jax.ShapeDtypeStruct((1, 2), float), jax.ShapeDtypeStruct((1,), int))
  >>> loss = lambda act: lambda w, e: (act(jnp.dot(w, e.x)) - 1) ** 2
  >>> relu, tanh = (gradient_view(loss(act), jnp.ones(2))
  ...   for act in (lambda z: jnp.maximum(z, 0.1 * z), jnp.tanh))
  >>> jumps(relu, shapes), jumps(tanh, shapes)
  (True, False)
  """
  rng = np.random.default_rng(0)
  with jax.enable_x64(True):
    # The ends are opposite, so that every unit without a bias changes its sign. They are longer
    # than first guesses, so that most others do, too.
    start = _LONG * rng.normal(size=guessed.x.shape)
    end = -start + rng.normal(size=guessed.x.shape)
    labels = np.zeros(guessed.y.shape, np.int32)

    @jax.jit
    def flat(t: Array) -> Array:
      message = view(Example((1 - t) * start + t * end, jnp.asarray(labels)))
      return jnp.concatenate([jnp.ravel(leaf) for leaf in jax.tree.leaves(message)])

    at = lambda t: np.asarray(flat(jnp.float64(t)))
    places = np.linspace(0, 1, _INTERVALS + 1)
    messages = [at(t) for t in places]
    least = _JUMP * max(np.linalg.norm(message) for message in messages)
    changes = [np.linalg.norm(b - a) for a, b in itertools.pairwise(messages)]
    for i in np.argsort(changes)[: -1 - _TRIED : -1]:
      low, high = places[i], places[i + 1]
      left, right = messages[i], messages[i + 1]
      for _ in range(_HALVINGS):
        middle = (low + high) / 2
        between = at(middle)
        if np.linalg.norm(between - left) >= np.linalg.norm(right - between):
          high, right = middle, between
        else:
          low, left = middle, between
      if np.linalg.norm(right - left) > least:
        return True
  return False


@dataclasses.dataclass(frozen=True)
class Dlg:
  """Deep leakage from gradients: L-BFGS on the squared distance of the messages.

  SciPy's line search finds 4 of 4 digits behind a convolutional network with tanh. With a
  fixed learning rate, 600 steps find none of them. Both kinds of steps find CIFAR-10 images behind
  Zhu's LeNet, if `memory` is large. Each of the paper's "300 iterations" is up to 20 steps here.

  Args:
    steps: largest number of gradient evaluations of one restart.
    learning_rate: factor of every L-BFGS step, if there is no line search.
    memory: number of pairs (step, change of the gradient) that L-BFGS keeps.
    tolerance: objective, as a share of |message|^2, at or below which a restart has converged.
    float64: whether to compute in float64, which resolves smaller differences than float32.
    line_search: whether to search for the length of each step. If False, `learning_rate` scales
      all steps, and all restarts run side by side.
  """

  steps: int = 3000
  learning_rate: float = 1.0
  memory: int = 100
  tolerance: float = 1e-12
  float64: bool = True
  line_search: bool = True

  def __post_init__(self):
    validate.integer_at_least(1, steps=self.steps, memory=self.memory)
    validate.flag(line_search=self.line_search)
    validate.positive(learning_rate=self.learning_rate)
    validate.non_negative(tolerance=self.tolerance)

  def check(self, view: View, guessed: Example) -> None:
    """Warns if the view's message jumps where the examples move, as behind a ReLU."""
    if jumps(view, guessed):
      warnings.warn(
        "Dlg on a network whose gradient jumps, as with ReLU: the second derivatives that it moves "
        "on vanish where activations are piecewise linear; use CosineAdam, and take failure for no "
        "protection",
        stacklevel=4,
      )

  def objective(self, guessed: ArrayTree, seen: ArrayTree, x: Array) -> Array:
    """Returns |guessed - seen|^2 / |seen|^2."""
    del x
    off = jax.tree.map(jnp.subtract, guessed, seen)
    return _dot(off, off) / _dot(seen, seen)

  def optimizer(self) -> optax.GradientTransformation:
    """Returns Optax's L-BFGS with a fixed learning rate."""
    return optax.lbfgs(self.learning_rate, memory_size=self.memory, linesearch=None)

  def project(self, x: Array) -> Array:
    """Returns the guess unchanged, since every input is allowed."""
    return x


@dataclasses.dataclass(frozen=True)
class CosineAdam:
  """Minimises the angle between two messages by Adam on signs of gradients; prefers smooth images.

  Args:
    steps: number of Adam steps; the learning rate is divided by 10 after 3/8, 5/8 and 7/8 of them.
    total_variation: weight of total variation, added to 1 - cosine; must be 0 without images.
    bounds: (low, high) of every input value.
    tolerance: objective at or below which a restart has converged; 0 is hardly ever reached.
  """

  steps: int = 4000
  learning_rate: float = 0.1
  total_variation: float = 0.1
  bounds: tuple[float, float] = (0.0, 1.0)
  tolerance: float = 0.0
  float64: bool = False

  def __post_init__(self):
    validate.integer_at_least(1, steps=self.steps)
    validate.positive(learning_rate=self.learning_rate)
    validate.non_negative(total_variation=self.total_variation, tolerance=self.tolerance)
    low, high = self.bounds if len(self.bounds) == 2 else (0.0, 0.0)
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
      raise UserError(
        "must be (low, high), finite, low < high", field="bounds", value=self.bounds
      )

  def check(self, view: View, guessed: Example) -> None:
    """Raises UserError if total variation is used and the examples are no images."""
    shape = guessed.x.shape
    if self.total_variation and len(shape) != 4:
      raise UserError(
        f"needs images [B, H, W, C], got shape {shape}; use total_variation=0",
        field="total_variation",
        value=self.total_variation,
      )

  def objective(self, guessed: ArrayTree, seen: ArrayTree, x: Array) -> Array:
    """Returns 1 - cos(guessed, seen) + total_variation * TV(x)."""
    off = jax.tree.map(jnp.subtract, _to_unit_length(guessed), _to_unit_length(seen))
    # |u - v|^2 / 2 is 1 - cosine, but keeps its digits where u and v are nearly equal.
    angle = _dot(off, off) / 2
    return angle + (
      self.total_variation * total_variation(x) if self.total_variation else 0
    )

  def optimizer(self) -> optax.GradientTransformation:
    """Returns Adam on the signs of gradients, with a falling learning rate."""
    drops: Any = {int(self.steps * part / 8): 0.1 for part in (3, 5, 7)}
    rate = optax.piecewise_constant_schedule(self.learning_rate, drops)
    return optax.chain(optax.scale_by_sign(), optax.adam(rate))

  def project(self, x: Array) -> Array:
    """Returns the guess, clipped to `bounds`."""
    return jnp.clip(x, *self.bounds)


class Reconstruction(NamedTuple):
  """Examples of the restart with the smallest objective."""

  x: np.ndarray  # [B, *features]
  labels: np.ndarray  # [B]
  objective: float  # of x
  # [R] smallest objective of each restart; infinite if no value was finite, or if the restart was
  # not tried.
  objectives: np.ndarray
  num_steps: int  # steps of the longest restart


class _Search(NamedTuple):
  """State of one restart. With leaves [R, ...] it holds the states of all restarts."""

  guess: Any  # {"x": [B, ...]} and, for unknown labels, {"logits": [B, K]}
  opt_state: Any
  best: Any  # the guess with the smallest objective so far
  objective: Array  # [] of best


@dataclasses.dataclass(frozen=True)
class Inversion:
  """An attack on the messages of one view, compiled once for all messages.

  `attack(seen, labels, key=key)` returns a `Reconstruction`.

  Args:
    view: what the adversary simulates, `gradient_view(...)` or `client_view(...)`.
    shape: [B, *features], shape of the examples behind one message; the adversary knows it.
    num_classes: number of classes; labels are 0 .. num_classes - 1.
    method: `Dlg()`, `CosineAdam()` or another `Method`.
    restarts: number of independent first guesses.
    finalists: largest number of restarts that run to the end, those with the smallest objectives
      after the trial. The other restarts stop after the trial, to save time. With a line search, a
      restart that ends its trial at or below 1e-3 goes on at once, before all are tried.
    trial: number of steps of a restart before the finalists are chosen.

  Raises:
    UserError: a batch of 0, no restarts, total variation without images, or a shape that the
      model does not take.

  >>> from dpjax.attacks.views import gradient_view
  >>> view = gradient_view(lambda w, e: jnp.tanh(jnp.dot(w, e.x)) ** 2, jnp.array([1.0, 0.5]))
  >>> seen = view(Example(jnp.array([[0.3, -0.2]]), jnp.array([0])))
  >>> attack = Inversion(view, (1, 2), num_classes=1, method=Dlg(steps=100), restarts=2)
  >>> inverted = attack(seen, [0], key=jax.random.key(0))
  >>> np.abs(inverted.x).round(3).tolist()  # tanh^2 is even: the sign does not show
  [[0.3, 0.2]]
  """

  view: View
  shape: Sequence[int]
  _: dataclasses.KW_ONLY
  num_classes: int
  method: Method = Dlg()
  restarts: int = 12
  finalists: int = 2
  trial: int = 200

  def __post_init__(self):
    counts = dict(restarts=self.restarts, finalists=self.finalists, trial=self.trial)
    validate.integer_at_least(1, num_classes=self.num_classes, **counts)
    dims = validate.several(shape=self.shape)
    if not dims:
      raise UserError("must be (batch, *features)", field="shape", value=())
    validate.integer_at_least(1, **validate.entries(shape=dims))
    object.__setattr__(self, "shape", tuple(map(int, dims)))
    guessed = self._guess_shapes(soft=False)
    _message_shapes(self.view, guessed)
    self.method.check(self.view, guessed)

  def __call__(
    self, seen: ArrayTree, labels: HostArray | None = None, *, key: Array
  ) -> Reconstruction:
    """Reconstructs the examples behind a message.

    Args:
      seen: the message, with the structure of the view's messages.
      labels: [B], known or from `infer_labels`. None: the method searches for labels together with
        the inputs, as in Zhu et al. 2019.
      key: typed key of the first guesses.

    Raises:
      UserError: labels outside their range, or a message that has NaN or complex numbers, has only
        zeros, or has other shapes than the view's.
    """
    check_seen(seen)
    if not any(np.any(leaf) for leaf in jax.tree.leaves(seen)):
      raise UserError("is 0 everywhere; nothing of the examples is in it", field="seen")
    known = None
    if labels is not None:
      known = check_labels(labels, self.shape[0], self.num_classes)
    trees.check_key(key=key)
    guessed = self._guess_shapes(soft=labels is None)
    _check_fits(_message_shapes(self.view, guessed), seen)
    # Some methods need float64: near the end, float32 cannot tell the guess's message from `seen`.
    with jax.enable_x64(self.method.float64):
      dtype = jnp.float64 if self.method.float64 else jnp.float32
      wide = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), seen)
      search = self._starts(jax.random.split(key, self.restarts), known)
      searching = getattr(self.method, "line_search", False)
      run = self._run_line_search if searching else self._run
      return run(search, wide, known)

  def _run(self, search: _Search, seen: Any, known: Any) -> Reconstruction:
    """Steps all restarts together until one converges or no step is left. Returns the best guess.

    After the trial, only the finalists go on.
    """
    objectives = np.full(self.restarts, np.inf)
    places = np.arange(self.restarts)
    taken = 0
    for taken in range(1, self.method.steps + 1):
      search = self._steps(search, seen, known)
      # Each check waits for the device, so most steps have no check.
      look = taken % _CHECK_EVERY == 0
      if look and bool(jnp.any(search.objective <= self.method.tolerance)):
        break
      if taken == self.trial:
        objectives = np.array(search.objective)
        places = np.argsort(objectives)[: self.finalists]
        search = jax.tree.map(lambda leaf: leaf[places], search)  # noqa: B023
    objectives[places] = search.objective
    return _best(jax.device_get(search), known, objectives, taken)

  def _run_line_search(self, search: _Search, seen: Any, known: Any) -> Reconstruction:
    """Runs trials in order, then finalists, until a restart converges. Returns the best guess."""
    method: Any = self.method
    parts = [search.guess[name] for name in ("x", "logits") if name in search.guess]
    points = np.concatenate(
      [np.reshape(part, (self.restarts, -1)) for part in parts], axis=1
    )
    objectives = np.full(self.restarts, np.inf)
    taken = np.zeros(self.restarts, int)

    def differentiated(point: np.ndarray) -> tuple[float, np.ndarray]:
      value, slope = self._slopes(point, seen, known)
      return float(value), np.asarray(slope, np.float64)

    def go_on(place: int, most: int) -> None:
      descent = line_search.descend(
        differentiated,
        points[place],
        steps=most - taken[place],
        memory=method.memory,
        tolerance=method.tolerance,
      )
      points[place] = descent.x
      objectives[place] = descent.value
      taken[place] += descent.num_steps

    ended: list[int] = []
    for place in range(self.restarts):
      go_on(place, min(self.trial, method.steps))
      if objectives[place] <= _PROMISING and taken[place] < method.steps:
        # This restart seems to converge. If it does, the other trials are not needed.
        ended.append(place)
        go_on(place, method.steps)
      if objectives[place] <= method.tolerance or len(ended) == self.finalists:
        break
    for place in np.argsort(objectives, kind="stable")[: self.finalists]:
      arrived = objectives.min() <= method.tolerance
      if not arrived and place not in ended and 0 < taken[place] < method.steps:
        go_on(int(place), method.steps)
    best = jax.device_get(jax.vmap(self._from_point)(jnp.asarray(points)))
    search = search._replace(best=best, objective=objectives)
    return _best(search, known, objectives, int(taken.max()))

  def _from_point(self, point: Array) -> dict[str, Array]:
    """Returns the guess in a vector [d]: inputs, then logits of the labels if these are unknown."""
    size = math.prod(self.shape)
    guess = {"x": point[:size].reshape(self.shape)}
    if point.shape[0] > size:
      guess["logits"] = point[size:].reshape(self.shape[0], self.num_classes)
    return guess

  def _guess_shapes(self, *, soft: bool) -> Example:
    """Returns the shapes of guessed examples, with probabilities as labels if `soft`."""
    size = self.shape[0]
    hard = jax.ShapeDtypeStruct((size,), jnp.int32)
    chances = jax.ShapeDtypeStruct((size, self.num_classes), jnp.float32)
    x = jax.ShapeDtypeStruct(tuple(self.shape), jnp.float32)
    return Example(x, chances if soft else hard)

  @functools.cached_property
  def _starts(self) -> Callable[..., _Search]:
    """Function (keys [R], labels) -> first state of all restarts, leaves [R, ...]."""
    method = self.method
    tx = self.method.optimizer()
    shape = tuple(self.shape)

    def start(key: Array, known: Any) -> _Search:
      dtype = jnp.float64 if method.float64 else jnp.float32
      of_x, of_labels = jax.random.split(key)
      guess = {"x": method.project(jax.random.normal(of_x, shape, dtype))}
      if known is None:
        chances = (shape[0], self.num_classes)
        guess["logits"] = jax.random.normal(of_labels, chances, dtype)
      # `best` is a copy, because the guess is donated to the first step.
      best = jax.tree.map(jnp.copy, guess)
      return _Search(guess, tx.init(guess), best, jnp.full((), jnp.inf, dtype))

    return jax.jit(jax.vmap(start, (0, None)))

  def _objective(self, guess: dict[str, Array], seen: Any, known: Any) -> Array:
    labels = jax.nn.softmax(guess["logits"]) if known is None else known
    guessed = self.view(Example(guess["x"], labels))
    return self.method.objective(guessed, seen, guess["x"])

  @functools.cached_property
  def _slopes(self) -> Callable[..., Any]:
    """Function (point [d], message, labels) -> (objective of the guess, gradient [d])."""

    def objective(point: Array, seen: Any, known: Any) -> Array:
      return self._objective(self._from_point(point), seen, known)

    return jax.jit(jax.value_and_grad(objective))

  @functools.cached_property
  def _steps(self) -> Callable[..., _Search]:
    """Function (states, message, labels) -> states of all restarts after one more step."""
    method = self.method
    tx = self.method.optimizer()

    def step(search: _Search, seen: Any, known: Any) -> _Search:
      value, slope = jax.value_and_grad(self._objective)(search.guess, seen, known)
      # NaN never counts as better.
      better = value < search.objective
      best = jax.tree.map(lambda a, b: jnp.where(better, a, b), search.guess, search.best)
      updates, opt_state = tx.update(slope, search.opt_state, search.guess)
      moved: Any = optax.apply_updates(search.guess, updates)
      guess = dict(moved, x=method.project(moved["x"]))
      return _Search(guess, opt_state, best, jnp.where(better, value, search.objective))

    # The state is donated to save memory: it holds the optimizer's state of every restart.
    return jax.jit(jax.vmap(step, (0, None, None)), donate_argnums=0)


def _message_shapes(view: View, guessed: Example) -> Any:
  try:
    return jax.eval_shape(view, guessed)
  except UserError:
    raise
  # A model may raise an error of any type.
  except Exception as error:
    reason = validate.first_line(error, with_type=True)
    raise UserError(
      f"the view takes no examples of that shape ({reason})",
      field="shape",
      value=guessed.x.shape,
    ) from error


def _check_fits(expected: Any, seen: Any) -> None:
  wanted = jax.tree.structure(expected)
  got = jax.tree.structure(seen)
  if wanted != got:
    raise UserError(
      f"must have the structure of the view's message, {wanted}, got {got}", field="seen"
    )
  pairs = zip(jax.tree_util.tree_leaves_with_path(seen), jax.tree.leaves(expected))
  for (path, leaf), shaped in pairs:
    if np.shape(leaf) != shaped.shape:
      name = jax.tree_util.keystr(path)
      raise UserError(
        f"must have shape {shaped.shape}, has {np.shape(leaf)}", field=f"seen{name}"
      )


def _best(search: _Search, known: Any, objectives: Any, taken: int) -> Reconstruction:
  """Returns the guess of the restart with the smallest objective."""
  place = int(np.argmin(search.objective))
  guess = jax.tree.map(lambda leaf: leaf[place], search.best)
  labels = np.argmax(guess["logits"], -1) if known is None else known
  return Reconstruction(
    x=np.asarray(guess["x"]),
    labels=np.asarray(labels, np.int32),
    objective=float(search.objective[place]),
    objectives=objectives,
    num_steps=taken,
  )
