"""Features of frozen public networks in a run, and what its guarantee then rests on.

They know the data that the network's weights were trained on (`dpjax.models.public_trunks`). Then
the guarantee is a claim, as it is of a run that begins from public weights (`saved.assumed`): no
record of the run may be among those data.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

import numpy as np

from dpjax import data, models
from dpjax.experiments.kinds.central import features
from dpjax.experiments.kinds.central.config import ModelConfig
from dpjax.experiments.run import guarantee, writers
from dpjax.models import public_trunks
from dpjax.validate import UserError

_CODE = ("dpjax.models.public_trunks", __name__)
# Data sets of tensorflow-datasets that hold records of ImageNet, by how their names begin.
_OF_IMAGENET = (
  "imagenet2012", "imagenet_resized", "imagenet_lt", "imagenette", "imagewang",
  "downsampled_imagenet",
)  # fmt: skip


def trained_on(model: str, data_name: str) -> tuple[str, ...]:
  """Returns the data that the features of a model know; () for features that know none.

  Args:
    data_name: the run's own data.

  Raises:
    UserError: they are those data.

  >>> trained_on("vgg16_linear", "cifar10"), trained_on("scatter_linear", "cifar10")
  (('ImageNet',), ())
  """
  trunk = public_trunks.TRUNKS.get(models.needs_features(model) or "")
  if trunk is None:
    return ()
  if data_name.startswith(_OF_IMAGENET):
    raise UserError(
      f"its features were trained on {trunk.knows}, whose records are in data.name="
      f"{data_name!r}; no epsilon would hold, so data or model must be others",
      field="model.name",
      value=model,
    )
  return (trunk.knows,)


def noted(
  promised: guarantee.Guarantee, model: str, known: Sequence[str]
) -> guarantee.Guarantee:
  """Returns the same guarantee, which says what the features of the model know.

  Args:
    known: what `trained_on` returned; () leaves the guarantee as it is.
  """
  if not known:
    return promised
  network = models.needs_features(model)
  data_sets = ", ".join(known)
  text = (
    f"Features. The inputs of the model are features of the public network {network}, which "
    f"was trained on {data_sets}. Nothing is promised to records that are in those data, too; "
    "that there are none is assumed, not checked."
  )
  assumed = f"no record of this run is known to {network}, which was trained on {data_sets}"
  wrapped = textwrap.fill(text, width=92, break_on_hyphens=False)
  return guarantee.noted(promised, wrapped, assumed)


def computed(
  config: ModelConfig, dataset: data.Dataset, trunk: str
) -> features.ComputedFeatures:
  """Returns the features of the images of a data set, before they are computed."""
  shape = public_trunks.trunk_shape(trunk, dataset.x.shape)

  def make() -> Iterator[np.ndarray]:
    chunks = public_trunks.trunk_chunks(dataset.x, trunk, mirrored=config.mirrored)
    with writers.progress(100, 0, f"{trunk} features, percent") as bar:
      yield from features.counted(chunks, len(dataset), bar)

  # The digest of the weights: features of other weights are others.
  settings = (shape, trunk, public_trunks.TRUNKS[trunk].sha256, config.mirrored)
  return features.ComputedFeatures(shape, settings, _CODE, make)
