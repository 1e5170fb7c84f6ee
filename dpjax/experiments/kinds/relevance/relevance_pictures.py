"""Draws pictures of one run: heat maps of the released net, and the maps that shaped its noise."""

from __future__ import annotations

import math
import pathlib

import jax.numpy as jnp
import numpy as np

from dpjax import pictures as looks
from dpjax import relevance
from dpjax.experiments.run import writers
from dpjax.pictures import Look
from dpjax.relevance.inputs import Outcome
from dpjax.relevance.lrp import Lrp, heat_map
from dpjax.validate import UserError

# Number of test images with heat maps.
_PICTURES = 8


def pictures(workdir: pathlib.Path, outcome: Outcome, how: Lrp) -> None:
  """Writes `workdir`/heat_maps.png: test images with the released net's relevance. If there are
  square maps of relevance and beta, writes maps.png. Does nothing for data other than images."""
  if np.ndim(outcome.test.x) != 4:
    return
  _heat_maps(workdir / "heat_maps.png", outcome, how)
  if outcome.maps:
    _maps(workdir / "maps.png", outcome.maps)


def _heat_maps(path: pathlib.Path, outcome: Outcome, how: Lrp) -> None:
  x = np.asarray(outcome.test.x[:_PICTURES])
  y = np.asarray(outcome.test.y[:_PICTURES])
  try:
    inputs = jnp.asarray(x), jnp.asarray(y)
    scores = relevance.lrp.relevance(outcome.apply, outcome.params, *inputs, how).scores
  except UserError as error:
    # If a layer of the net has no propagation rule, the run is still valid, without heat maps.
    writers.warn(f"no heat maps: {error}")
    return
  look = Look(width=max(1.0, 0.85 * len(y)))
  figure = looks.new_figure(look, height=2.1)
  axes = figure.subplots(2, len(y), squeeze=False)
  for column, (image, scores_of_image, label) in enumerate(zip(x, np.asarray(scores), y)):
    # A constant image has no range to divide by.
    scaled = (image - image.min()) / max(float(np.ptp(image)), 1e-12)
    shown = scaled if scaled.shape[-1] == 3 else scaled[..., 0]
    axes[0, column].imshow(shown, cmap="gray_r")
    axes[0, column].set_title(f"class {label}", fontsize=7)
    axes[1, column].imshow(heat_map(scores_of_image))
  for axis in axes.ravel():
    axis.set_axis_off()
  words = "test images; relevance for the true class: red for, blue against"
  looks.headline(figure, look, words)
  looks.save(figure, path)


def _maps(path: pathlib.Path, maps: dict[str, np.ndarray]) -> None:
  # A map is a flat array. Its size determines its shape only for square images.
  sides = {name: math.isqrt(values.size) for name, values in maps.items()}
  square = {name: side for name, side in sides.items() if 1 < side**2 == maps[name].size}
  if not square:
    return
  figure = looks.new_figure(Look(width=2.3 * len(square)), height=2.2)
  axes = figure.subplots(1, len(square), squeeze=False)[0]
  for axis, (name, side) in zip(axes, square.items()):
    drawn = axis.imshow(maps[name].reshape(side, side), cmap="magma")
    axis.set_title(name.replace("_", " "), fontsize=8)
    axis.set_axis_off()
    figure.colorbar(drawn, ax=axis, shrink=0.8).ax.tick_params(labelsize=7)
  looks.save(figure, path)
