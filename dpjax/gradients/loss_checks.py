"""Checks that a loss takes one example, is a scalar, is differentiable and has no side effect.

Most checks trace the loss. Each error is one line that says how to write the loss instead.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpjax import jaxprs, validate
from dpjax.gradients.traced_values import as_varying_as
from dpjax.types import ArrayTree, LossFn, Params

# JAX raises these errors if Python needs the value of a traced number.
_CONCRETE = (
  jax.errors.ConcretizationTypeError,
  jax.errors.NonConcreteBooleanIndexError,
  jax.errors.TracerArrayConversionError,
  jax.errors.TracerIntegerConversionError,
)
# Modules of dpjax with batching rules of their own, which mix no clients. The rule of the noise
# only looks for equal keys. The other rule takes clients one by one.
_KEEP_CLIENTS_APART = ("dpjax.noise.gaussian", "dpjax.gradients.clients_apart")
# These primitives return nothing to the program, so they cannot connect examples.
_HARMLESS = ("debug_callback", "debug_print")
# Values of vmap_method with which a callback gets one example per call. None is an operation
# without this parameter, or a callback that vmap refuses. All others pass it the whole batch.
_ONE_BY_ONE = (None, "sequential", "sequential_unrolled")


class Loss(NamedTuple):
  """The program of ONE example's loss, which has been checked."""

  closed: (
    Any  # closed jaxpr; its inputs are the leaves of the parameters, then of the example
  )
  mixes: bool  # whether `jax.vmap` could mix examples (`mixes`)


def check_loss(loss_fn: LossFn, params: Params, batch: ArrayTree) -> Loss:
  """Returns the program of the loss of ONE example.

  Raises UserError unless `loss_fn(params, ONE example)` is a real scalar, without side effects and
  without batching rules of its own. Where it has custom derivatives, the gradient is traced, too,
  since it shows their rules.
  """
  example = _example(batch)
  closed = _trace(loss_fn, params, example, batch)
  eqns = list(jaxprs.every_equation(closed))
  more = []
  for eqn in eqns:
    if eqn.primitive.name.startswith("custom_"):
      # `explain_failure` reports a loss that cannot be differentiated.
      with contextlib.suppress(Exception):
        # JAX would add gradients of unmarked parameters up over devices, which is no collective of
        # the loss's own.
        marked = as_varying_as(batch, jax.tree.map(jnp.asarray, params))
        grad = jax.make_jaxpr(jax.grad(lambda p, e: loss_fn(p, e)))(marked, example)
        more = list(jaxprs.every_equation(grad))
      break
  _refuse_effects([*eqns, *more], "loss_fn")
  _refuse_own_batching([*eqns, *more], "loss_fn", "examples")
  return Loss(closed, any(map(mixes, eqns)))


def check_closure(loss: Loss, rows: ArrayTree) -> None:
  """Raises UserError if the loss of ONE example closes over arrays of the batch.

  What was computed from the batch before the loss, such as its mean, is not seen.

  Args:
    rows: the examples and the mask of the batch, as the caller has them.
  """
  leaves = jax.tree.leaves(rows)
  on_host = [leaf for leaf in leaves if isinstance(leaf, np.ndarray)]
  for array in [*loss.closed.consts, *jaxprs.closed_over(loss.closed)]:
    of_host = isinstance(array, np.ndarray) and array.size
    if any(array is leaf for leaf in leaves) or (
      of_host and any(np.may_share_memory(array, leaf) for leaf in on_host)
    ):
      raise validate.UserError(
        "reads arrays of the batch beside its one example, so each gradient would depend on all "
        "examples; no statistic of a batch, no pairs within it and no number of its rows",
        field="loss_fn",
      )


def check_callable(loss_fn: Any) -> None:
  """Raises UserError unless `loss_fn` can be called with two arguments."""
  if not callable(loss_fn):
    raise validate.UserError(
      "must be a function (params, ONE example) -> scalar",
      field="loss_fn",
      value=validate.Verbatim(f"{' '.join(repr(loss_fn).split()):.60}"),
    )
  try:
    signature = inspect.signature(loss_fn)
  # Some built-in functions have no readable signature.
  except (TypeError, ValueError):
    return
  try:
    signature.bind(None, None)
  except TypeError as error:
    reason = validate.first_line(error, with_type=True)
    raise validate.UserError(
      f"must take two arguments, (params, ONE example): {reason}",
      field="loss_fn",
    ) from None


def vmap_would_do(loss: Loss) -> bool:
  """Returns whether gradients of the loss under `jax.vmap` are those of single examples.

  The result is False if the loss computes in floats of less than 32 bits: JAX would round
  gradients, or they would overflow, before they are clipped. It is also False if a convolution
  could mix examples (`mixes`).
  """
  atoms = list(loss.closed.jaxpr.invars)
  for eqn in jaxprs.every_equation(loss.closed):
    atoms += [*eqn.invars, *eqn.outvars]
  return not loss.mixes and not any(jaxprs.is_narrow(atom.aval) for atom in atoms)


def mixes(eqn: Any) -> bool:
  """Returns whether an equation of ONE example may mix examples under `jax.vmap`.

  There the gradient of a convolution's kernel is a convolution with groups, one for each example.
  XLA's CPU backend computes some of these by one kernel with zeros between groups. An example that
  is not finite, times those zeros, makes the gradients of all others NaN. This was seen for kernels
  that have groups themselves, and in double precision. A custom derivative may hold such a
  convolution, even if its function holds none.
  """
  if eqn.primitive.name.startswith(("custom_jvp", "custom_vjp")):
    return _derivative_mixes(eqn)
  return _mixes_itself(eqn)


def _mixes_itself(eqn: Any) -> bool:
  if eqn.primitive.name != "conv_general_dilated":
    return False
  groups = eqn.params["feature_group_count"] * eqn.params["batch_group_count"]
  return groups > 1 or any(var.aval.dtype.itemsize > 4 for var in eqn.invars)


def _derivative_mixes(eqn: Any) -> bool:
  """Returns whether the forward or backward pass of an equation may mix examples."""
  call = jaxprs.eqn_fn(eqn)
  is_float = [jaxprs.is_float(var.aval) for var in eqn.outvars]

  def squares(*args: Any) -> Any:
    results = [y for y, use in zip(call(*args), is_float) if use and y is not None]
    return sum(jnp.sum(jnp.real(y * jnp.conj(y))).astype(jnp.float32) for y in results)

  shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in jaxprs.operands(eqn)]
  of_floats = [i for i, x in enumerate(shapes) if jnp.issubdtype(x.dtype, jnp.floating)]
  if not of_floats or not any(is_float):
    return False
  try:
    traced = jax.make_jaxpr(jax.grad(squares, of_floats, allow_int=True))(*shapes)
  # What cannot be looked into may hold anything.
  except Exception:
    return True
  return any(map(_mixes_itself, jaxprs.every_equation(traced.jaxpr)))


def check_client(client_fn: Callable[..., Any], *many: ArrayTree) -> Any:
  """Returns the jaxpr of ONE client, given arguments of K clients, leaves [K, ...].

  Raises UserError if a client could see others under `vmap`.
  """
  jaxpr = jax.make_jaxpr(client_fn)(*_example(many)).jaxpr
  rule_of = lambda eqn: getattr(eqn.params.get("rule"), "__module__", None)
  others = (
    eqn for eqn in jaxprs.every_equation(jaxpr) if rule_of(eqn) not in _KEEP_CLIENTS_APART
  )
  _refuse_own_batching(others, "client", "clients")
  return jaxpr


def check_apart(fn: Callable[..., Any], *many: ArrayTree, name: str) -> None:
  """Raises UserError if one example could reach another in `fn` under `vmap`.

  Args:
    fn: function of one or more arguments, for ONE example.
    many: arguments for all examples, with leaves [B, ...].
    name: name of the function in the error.
  """
  closed = jax.make_jaxpr(lambda *each: fn(*each))(*_example(many))
  eqns = list(jaxprs.every_equation(closed))
  _refuse_effects(eqns, name)
  for eqn in eqns:
    if mixes(eqn):
      raise validate.UserError(
        "has a convolution in groups, or in double precision: it could mix examples under jax.vmap",
        field=name,
      )
  _refuse_own_batching(eqns, name, "examples")


def _refuse_effects(eqns: Iterable[Any], name: str) -> None:
  for eqn in eqns:
    # A call has the effects of its content, so the error must name the equation inside.
    if eqn.primitive.name in _HARMLESS or jaxprs.inside(eqn):
      continue
    # Some collectives, such as `ppermute`, state no effect.
    if "axis_name" in eqn.params or (eqn.effects and "axes" in eqn.params):
      does, remedy = "runs along an axis of many", "compute it of ONE example alone"
    elif not eqn.effects:
      continue
    elif any(hasattr(var.aval, "inner_aval") for var in (*eqn.invars, *eqn.outvars)):
      does, remedy = (
        "reads or writes a Ref, as a Pallas kernel does",
        "write it with jax.numpy",
      )
    else:
      does, remedy = (
        "has a side effect",
        "return what it computes, or use jax.pure_callback",
      )
    raise validate.UserError(
      f"'{eqn.primitive.name}' {does}, through which one example could reach another; {remedy}",
      field=name,
    )


def _refuse_own_batching(eqns: Iterable[Any], name: str, others: str) -> None:
  """Raises UserError for operations that define their own batching, since they get all examples."""
  for eqn in eqns:
    what = eqn.primitive.name
    method = eqn.params.get("vmap_method")
    if what == "custom_vmap_call" or method not in _ONE_BY_ONE:
      reason = f"vmap_method={method!r}" if method else "a batching rule of its own"
      raise validate.UserError(
        f"'{what}' has {reason}, which sees all {others} and could mix them; "
        "use jax.vmap's own rules, or vmap_method='sequential'",
        field=name,
      )


def explain_failure(loss: Loss, count: int, error: Exception) -> None:
  """Raises UserError that names the cause of `error`: a primitive without a derivative, or an
  operation that JAX cannot batch. Returns None for any other cause.

  `count`: number of leaves of the parameters."""
  jaxpr = loss.closed.jaxpr
  for eqn in jaxprs.between(jaxpr, jaxpr.invars[:count]):
    if not _differentiable(eqn):
      raise validate.UserError(
        f"'{eqn.primitive.name}' has no reverse-mode derivative; write it with "
        "lax.scan, give it a jax.custom_vjp, or put lax.stop_gradient around it",
        field="loss_fn",
      )
  if isinstance(error, NotImplementedError):
    reason = validate.first_line(error, with_type=True)
    raise validate.UserError(
      f"holds an operation that JAX cannot batch over examples ({reason}); "
      "write it with jnp.einsum, jnp.where or lax.scan",
      field="loss_fn",
    ) from error


def _example(batch: Any) -> Any:
  """Returns shapes and types of the first example."""

  def shaped(leaf):
    weak = getattr(leaf, "weak_type", False)
    return jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype, weak_type=weak)

  return jax.tree.map(shaped, batch)


def _words(example: Any) -> str:
  """Returns path, type and shape of each array of an example."""
  leaves = jax.tree_util.tree_leaves_with_path(example)
  return ", ".join(
    f"{jax.tree_util.keystr(path) or 'one array'}: {leaf.dtype}{list(leaf.shape)}"
    for path, leaf in leaves
  )


def _trace(loss_fn: LossFn, params: Params, example: Any, batch: Any) -> Any:
  """Returns the jaxpr of a loss whose result is a real scalar."""

  # A new function, since JAX caches traces by function.
  def checked(params: Any, example: Any) -> Any:
    loss = loss_fn(params, example)
    is_number = isinstance(loss, bool | int | float | complex)
    shape = () if is_number else getattr(loss, "shape", type(loss).__name__)
    if shape != ():
      raise validate.UserError(
        f"returned {shape}: must be a scalar for ONE example; dpjax adds the batch axis",
        field="loss_fn",
      )
    dtype = jnp.result_type(loss)
    if not jnp.issubdtype(dtype, jnp.floating):
      raise validate.UserError(
        f"returned {dtype}: must be a real floating-point number", field="loss_fn"
      )
    return loss

  try:
    with _no_batch_norm():
      return jax.make_jaxpr(checked)(params, example)
  # This error needs no further explanation.
  except validate.UserError:
    raise
  except Exception as error:
    hint = _hint(error)
    reason = type(error).__name__
    if hint is None and _runs(loss_fn, params, batch):
      reason = validate.first_line(error, with_type=True).partition(". ")[0]
      hint = (
        "fails on ONE example but runs on a batch; write it for one example. A model that reads "
        "batches is called on example.x[None], and [0] taken"
      )
    if hint is None:
      # An error of the loss's own code keeps its frames, and says what the loss was called with.
      error.add_note(
        f"loss_fn was called with ONE example, which holds {_words(example)}. A model that reads "
        "batches is called on example.x[None], and [0] taken"
      )
      raise
    raise validate.UserError(f"{hint} ({reason:.80})", field="loss_fn") from error


_HINTS: dict[type[Exception], str] = {
  **dict.fromkeys(
    _CONCRETE,
    "the loss reads numbers while it is traced; write it with jnp in place of np, jnp.where or "
    "lax.cond in place of if, and without float() or int()",
  ),
  jax.dtypes.TypePromotionError: "JAX has no common type for them; cast one of them, such as "
  "w.astype(jnp.float32)",
}
_COPY = (
  "the model changes in its call; merge a copy: nnx.merge(graph, params, rest, copy=True); Dropout "
  "also needs nnx.reseed(model, default=example.key, dropout=example.key). BatchNorm mixes examples"
)
# By the names of the classes in `flax.errors`, which is not imported here.
_FLAX_HINTS = {
  "InvalidRngError": "Dropout needs a key for each example: draw from example.key "
  "(linen: rngs={'dropout': example.key}; nnx: nnx.reseed(model, default=example.key, "
  "dropout=example.key)) and give training.dp_sgd an example_key",
  "TraceContextError": _COPY,
  "ModifyScopeVariableError": "the loss cannot keep a layer's state; GroupNorm or LayerNorm in "
  'place of BatchNorm, or "batch_stats" from outside of the loss; SpectralNorm with '
  "update_stats=False",
}


def _hint(error: Exception) -> str | None:
  """Returns how to write a loss that raised this error in a trace; None if only the loss knows."""
  # Python names what it has not found. JAX does not, if it has not found the axis of a collective.
  if isinstance(error, NameError) and error.name is None:
    return (
      f"{validate.first_line(error).partition('. ')[0]}: a collective would mix examples; the loss "
      "of ONE example must not see the others"
    )
  flax = sys.modules.get("flax.errors")
  of_flax = (
    {getattr(flax, name): hint for name, hint in _FLAX_HINTS.items()} if flax else {}
  )
  hints = _HINTS | of_flax
  for kind, hint in hints.items():
    if isinstance(error, kind):
      return hint
  # Where nnx takes a model of another trace apart, it raises an error without a class of its own.
  *_, (last, _) = traceback.walk_tb(error.__traceback__)
  if not last.f_globals.get("__name__", "").startswith("flax.nnx"):
    return None
  # A key that is None came from an example that got none.
  return _FLAX_HINTS["InvalidRngError"] if "Invalid rng value" in str(error) else _COPY


@contextlib.contextmanager
def _no_batch_norm() -> Iterator[None]:
  """Context that raises UserError if a linen BatchNorm computes statistics. One example has no
  useful statistics, and statistics of a batch mix examples."""
  linen = sys.modules.get("flax.linen")
  # If Flax was never imported, the loss has no layer of it.
  if linen is None:
    yield
    return

  def watch(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
    if isinstance(context.module, linen.BatchNorm) and context.method_name == "__call__":
      # The mode is an argument of the call, by name or position, or else of the layer.
      average = kwargs.get("use_running_average", args[1] if len(args) > 1 else None)
      average = context.module.use_running_average if average is None else average
      if not average:
        raise validate.UserError(
          "BatchNorm mixes examples; use GroupNorm or LayerNorm, which see one example",
          field="loss_fn",
        )
    return call(*args, **kwargs)

  with linen.intercept_methods(watch):
    yield


def _runs(loss_fn: LossFn, params: Params, batch: Any) -> bool:
  try:
    jax.make_jaxpr(lambda p, b: loss_fn(p, b))(params, batch)
  # The loss may raise any error: then a missing batch axis is not the reason.
  except Exception:
    return False
  return True


def _differentiable(eqn: Any) -> bool:
  fn = jaxprs.eqn_fn(eqn)
  operands = jaxprs.operands(eqn)
  floats = [i for i, var in enumerate(operands) if jaxprs.is_float(var.aval)]

  def total(chosen, values):
    known = dict(zip(floats, chosen))
    results = fn(*(known.get(i, value) for i, value in enumerate(values)))
    return sum(jnp.sum(x) for x in results if x is not None and jaxprs.is_float(x))

  shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in operands]
  try:
    jax.eval_shape(jax.grad(total), [shapes[i] for i in floats], shapes)
  # A primitive without a derivative may raise an error of any type.
  except Exception:
    return False
  return True
