"""Weights of other libraries in safetensors files: names, shapes and values, checked.

A file is read, never executed. A loader says from which tensors each parameter is made (`Origin`).
`parameters` checks the file against these origins, and raises a UserError if they differ. Errors
here name no field: whoever knows which argument or setting gave the file adds it
(`dpjax.validate.about`).
"""

from __future__ import annotations

import json
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from dpjax.parallel import allocator
from dpjax.types import Params
from dpjax.validate import UserError, no_pipe

INSTALL = "pip install -e '.[lm]' in dpjax's clone"
HEAD = "head"  # the last layer
_DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": jnp.bfloat16}
_MOST_NAMES = 3  # largest number of names that an error shows

Path = tuple[str, ...]  # path of a parameter in a linen tree
Shape = tuple[int, ...]


class Origin(NamedTuple):
  """Names the tensors that one parameter is made from, and says how they are combined."""

  names: tuple[str, ...]
  shapes: Callable[[Shape], list[Shape]]  # shape of the parameter -> shapes of the tensors
  combine: Callable[[list[np.ndarray]], np.ndarray]


def library() -> Any:
  """Returns the library safetensors. Raises UserError if it is not installed."""
  try:
    import safetensors.numpy
  except ImportError as error:
    raise UserError(
      f"is not installed ({error}); {INSTALL}", field="safetensors"
    ) from error
  return safetensors


def read(
  path: str | os.PathLike[str], bare: Callable[[str], str], passed_over: re.Pattern[str]
) -> tuple[dict[str, np.ndarray], dict[str, str]]:
  """Reads the weights and the metadata of a safetensors file.

  Args:
    bare: function that returns the name of a tensor without a prefix.
    passed_over: pattern of the bare names of tensors that are no weights. Such tensors may have any
      type, and are left out.

  Returns:
    (weights by bare name, the file's metadata).

  Raises:
    UserError: the file is missing or is no safetensors file; a weight is not F32, F16 or BF16; two
      tensors have the same bare name; the library is not installed. The message is one line.
  """
  return tensors(content_of(path), bare, passed_over)


def tensors(
  data: bytes, bare: Callable[[str], str], passed_over: re.Pattern[str]
) -> tuple[dict[str, np.ndarray], dict[str, str]]:
  """Returns what `read` returns, for the bytes of a file."""
  reader = library()
  try:
    entries = reader.deserialize(data)
  except reader.SafetensorError as error:
    raise UserError(f"is no safetensors file ({error})") from error
  held = {}
  for name, entry in entries:
    short = bare(name)
    if passed_over.fullmatch(short):
      continue
    if entry["dtype"] not in _DTYPES:
      known = ", ".join(_DTYPES)
      raise UserError(f"{name} is {entry['dtype']}, must be one of {known}")
    # If two tensors have the same bare name, nothing says which one to use.
    if short in held:
      raise UserError(f"holds a tensor twice, by two names: {short}")
    array = np.frombuffer(entry["data"], _DTYPES[entry["dtype"]])
    held[short] = array.reshape(entry["shape"])
  # A file begins with the length of its JSON header, in 8 bytes.
  header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
  return held, header.get("__metadata__", {})


def content_of(path: str | os.PathLike[str]) -> bytes:
  """Reads a whole file of weights.

  Raises:
    UserError: the file is missing, is a folder, a pipe or a device, or is larger than the machine's
      memory.
  """
  no_pipe(path)
  memory = allocator.machine_memory()
  try:
    # A file with holes may be larger than the memory, and even larger than the disk.
    size = os.path.getsize(path)
    if size > memory:
      raise UserError(f"has {size} bytes, more than the memory of this machine")
    return pathlib.Path(path).read_bytes()
  except OSError as error:
    raise UserError(f"{error.strerror}") from error


def shapes(model: nn.Module, example: jax.Array) -> dict[Path, Shape]:
  """Returns the shape of each parameter, by path, of a model for batches such as `example`."""
  variables: Any = jax.eval_shape(model.init, jax.random.key(0), example)
  flat: dict[Path, Any] = traverse_util.flatten_dict(variables["params"])
  return {path: leaf.shape for path, leaf in flat.items()}


def check_names(held: Iterable[str], wanted: Iterable[str]) -> None:
  """Raises UserError unless the two sets of names are equal."""
  missing = {*wanted} - {*held}
  unknown = {*held} - {*wanted}
  for what, odd in (("lacks", missing), ("has unknown", unknown)):
    if odd:
      first = ", ".join(sorted(odd)[:_MOST_NAMES])
      more = len(odd) - _MOST_NAMES
      raise UserError(f"{what} {first}{f' and {more} more' if more > 0 else ''}")


def finite(array: np.ndarray, name: str) -> None:
  """Raises UserError if a value is not finite."""
  if not np.isfinite(array).all():
    raise UserError(f"{name} holds values that are not finite")


def parameters(
  held: Mapping[str, np.ndarray],
  sources: Mapping[Path, Origin],
  wanted: Mapping[Path, Shape],
  begun: Params,
) -> Params:
  """Makes the float32 parameters of a model from the tensors of a file.

  The last layer keeps its values in `begun` if the file has no last layer for this number of
  classes.

  Args:
    held: tensors by name, without those that are skipped.
    sources: `Origin` of each parameter.
    wanted: shape of each parameter.
    begun: first parameters of the model, {"params": ...}.

  Raises:
    UserError: a tensor is missing, unknown, of another shape, or not finite.
  """
  held = dict(held)
  first: Any = begun
  flat: dict[Path, Any] = dict(traverse_util.flatten_dict(first["params"]))
  loaded = dict(sources)
  last = {path: source for path, source in sources.items() if path[0] == HEAD}
  head_fits = all(
    name in held and held[name].shape == shape
    for path, source in last.items()
    for name, shape in zip(source.names, source.shapes(wanted[path]))
  )
  # If the file has no head, or one of another shape, the head keeps its first parameters.
  if not head_fits:
    for path, source in last.items():
      loaded.pop(path)
      for name in source.names:
        held.pop(name, None)
  names = {name for source in loaded.values() for name in source.names}
  check_names(held, names)
  for path, source in loaded.items():
    for name, shape in zip(source.names, source.shapes(wanted[path])):
      if held[name].shape != shape:
        have = f"{name} is of shape {held[name].shape}"
        raise UserError(f"{have}, the model wants {shape}")
      finite(held[name], name)
    value = source.combine([held[name].astype(np.float32) for name in source.names])
    # A parameter that is folded from a negative variance may overflow or be NaN.
    finite(value, "/".join(path))
    flat[path] = jnp.asarray(value)
  return {"params": traverse_util.unflatten_dict(flat)}


def same(name: str) -> Origin:
  """Returns the origin of a parameter that equals one tensor."""
  return Origin((name,), lambda shape: [shape], lambda arrays: arrays[0])


def concatenate(*names: str) -> Origin:
  """Returns the origin of a vector that concatenates the named vectors, all of one length."""
  count = len(names)
  return Origin(names, lambda shape: [(shape[0] // count,)] * count, np.concatenate)


def linear(*names: str) -> Origin:
  """Returns the origin of a kernel [in, out]: one or several weights [out, in] of torch, with their
  outputs concatenated."""
  count = len(names)
  return Origin(
    names,
    lambda shape: [(shape[1] // count, shape[0])] * count,
    lambda arrays: np.concatenate(arrays).T,
  )


def of_norm(layer: Path, name: str) -> dict[Path, Origin]:
  """Returns the origins of scale and bias of a LayerNorm."""
  return {
    (*layer, "scale"): same(f"{name}.weight"),
    (*layer, "bias"): same(f"{name}.bias"),
  }


def of_dense(layer: Path, *names: str) -> dict[Path, Origin]:
  """Returns the origins of a dense layer's kernel and bias, from one or several layers of torch."""
  return {
    (*layer, "kernel"): linear(*(f"{name}.weight" for name in names)),
    (*layer, "bias"): concatenate(*(f"{name}.bias" for name in names)),
  }


def convolution(name: str) -> Origin:
  """Returns the origin of a kernel [h, w, in, out] that is torch's weight [out, in, h, w]."""
  return Origin(
    (name,), lambda shape: [_torch_shape(shape)], lambda arrays: _hwio(arrays[0])
  )


def folded_kernel(name: str, norm: str, epsilon: float) -> Origin:
  """Returns the origin of a kernel [h, w, in, out] with the batch norm after it folded in. The norm
  multiplies the kernel by scale / standard deviation."""

  def combine(arrays: list[np.ndarray]) -> np.ndarray:
    weight, scale, variance = arrays
    with np.errstate(invalid="ignore"):
      factor = scale / np.sqrt(variance.astype(np.float64) + epsilon)
    return (_hwio(weight) * factor[None, None, None]).astype(np.float32)

  names = (name, f"{norm}.weight", f"{norm}.running_var")
  return Origin(
    names, lambda shape: [_torch_shape(shape), (shape[3],), (shape[3],)], combine
  )


def folded_bias(norm: str, epsilon: float) -> Origin:
  """Returns the origin of a convolution's bias, made from the frozen batch norm after it."""

  def combine(arrays: list[np.ndarray]) -> np.ndarray:
    bias, mean, scale, variance = arrays
    with np.errstate(invalid="ignore"):
      factor = scale / np.sqrt(variance.astype(np.float64) + epsilon)
    return (bias - mean * factor).astype(np.float32)

  parts = ("bias", "running_mean", "weight", "running_var")
  return Origin(
    tuple(f"{norm}.{part}" for part in parts), lambda shape: [shape] * 4, combine
  )


def _torch_shape(shape: Shape) -> Shape:
  height, width, inputs, outputs = shape
  return (outputs, inputs, height, width)


def _hwio(weight: np.ndarray) -> np.ndarray:
  return weight.transpose(2, 3, 1, 0)
