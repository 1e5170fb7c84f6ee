"""Combinations of features that transforms and plans refuse."""

from __future__ import annotations

from typing import Any

import jax

from dpjax.gradients import Clip, Flat
from dpjax.noise import NoiseShape
from dpjax.sampling import Sampler
from dpjax.validate import NO_VALUE, UserError, Verbatim

_SHAPED = ("clipping that is not flat", "noise shares", "a frozen group")
_EPOCHS = "epochs that are accounted at the noise of their first step"
_BANDS = (
  "noise of several bands, which needs a sampler that bounds how often an example takes "
  "part, such as CyclicSampler or CyclicPoissonSampler"
)
# Feature -> features with which it is refused, as there is no proof or no implementation.
APART = {
  "adaptive clipping": (
    *("several clip norms", "a clip schedule", "noise shares", "a noise schedule"),
    *("correlated noise", "slices", "bounded participation"),
  ),
  "a clip schedule": ("clipping that is not flat",),
  "correlated noise": _SHAPED,
  "a noise schedule": (*_SHAPED, _EPOCHS),
  _BANDS: ("free participation",),
  "scaled coordinates": (
    *("adaptive clipping", "a clip schedule", "clipping that is not flat"),
    *("several clip norms", "noise shares", "correlated noise", "bounded participation"),
    "slices",
  ),
  "private statistics": ("users",),
}


def features(
  clip: Clip,
  shape: NoiseShape,
  *,
  sampler: Sampler | None = None,
  slices: int = 1,
  statistics: object = None,
  scaling: object = None,
  unit: str = "example",
) -> dict[str, dict[str, Any]]:
  """Returns feature -> {"field", "value"} of the argument that causes it, for the features that are
  present. It raises UserError if `shape` is no `NoiseShape`.

  >>> features(Clip(1.0), NoiseShape(schedule=(2.0, 1.0)))
  {'a noise schedule': {'field': 'noise_schedule', 'value': (2.0, 1.0)}}
  """
  if not isinstance(shape, NoiseShape):
    raise UserError("must be a NoiseShape", field="noise_shape", value=shape)
  norms = "l2_clip_norm", clip.norms
  rule = "clipping", clip.rule
  strategy = "correlation", Verbatim(type(shape.correlation).__name__)
  present: dict[str, tuple[Any, tuple[str, Any]]] = {
    "adaptive clipping": (clip.rule.adapts, rule),
    "clipping that is not flat": (type(clip.rule) is not Flat, rule),
    "several clip norms": (not clip.is_one_number, norms),
    "a frozen group": (0 in jax.tree.leaves(clip.norms), norms),
    "a clip schedule": (clip.schedule, ("clip_schedule", clip.schedule)),
    "noise shares": (shape.shares is not None, ("noise_shares", shape.shares)),
    "a noise schedule": (shape.schedule, ("noise_schedule", shape.schedule)),
    "correlated noise": (shape.correlation is not None, strategy),
    _BANDS: (shape.has_bands, strategy),
    "slices": (slices != 1, ("slices", slices)),
    "scaled coordinates": (scaling is not None, ("scaling", scaling)),
    "private statistics": (statistics is not None, ("statistics", NO_VALUE)),
  }
  if sampler is not None:
    free = sampler.participation is None
    drawn = "sampler", sampler
    present["free participation"] = (free, drawn)
    present["bounded participation"] = (not free, drawn)
    # Private statistics protect a row, which is only a part of a user's data.
    owner = drawn if sampler.unit == unit else ("unit", unit)
    present["users"] = (unit != "example", owner)
    present[_EPOCHS] = (sampler.period != 1, drawn)
  return {
    name: {"field": field, "value": value}
    for name, (has, (field, value)) in present.items()
    if has
  }


def check(present: dict[str, dict[str, Any]]) -> None:
  """Raises UserError for the first pair in `APART` of which both are among these `features`.

  >>> check(features(Clip(1.0, "automatic"), NoiseShape(schedule=(2.0, 1.0))))
  Traceback (most recent call last):
  ...
  dpjax.validate.UserError: clipping=Automatic(gamma=0.01): not with a noise schedule
  """
  for feature, apart in APART.items():
    for other in apart:
      if feature in present and other in present:
        raise UserError(f"not with {feature}", **present[other])
