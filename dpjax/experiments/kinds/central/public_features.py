"""Computes features of frozen public networks; they add an assumption to the guarantee.

The features depend on the data that the network was trained on (`networks.public_trunks`). So the
guarantee is a claim, as for a run that starts from public weights (`saved.assumption`): it assumes
that no record of the run is among those data.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from dpjax import data
from dpjax.accounting.text import paragraph
from dpjax.data import text
from dpjax.experiments.kinds.central import features
from dpjax.experiments.kinds.central.config import ModelConfig
from dpjax.experiments.run import guarantee
from dpjax.validate import UserError
from dpjax.zoo.networks import public_trunks, registry, sentence_encoder

_CODE = ("dpjax.zoo.networks.public_trunks", "dpjax.models.pooling", __name__)
_CODE_OF_TEXTS = (
  "dpjax.zoo.networks.sentence_encoder",
  "dpjax.zoo.networks.bert",
  __name__,
)
# Beginnings of the names of TFDS data sets that hold records of ImageNet.
_OF_IMAGENET = (
  "imagenet2012", "imagenet_resized", "imagenet_lt", "imagenette", "imagewang",
  "downsampled_imagenet",
)  # fmt: skip
# Beginnings of the names of data sets whose texts all-MiniLM-L6-v2 was trained on.
_OF_SENTENCES = (
  "eli5", "glue/mnli", "glue/qqp", "gooaq", "ms_marco", "multi_nli", "natural_questions", "reddit",
  "snli", "squad", "trivia_qa", "wikihow", "yahoo_answers",
)  # fmt: skip


def trained_on(model: str, data_name: str) -> tuple[str, ...]:
  """Returns names of the data that a model's features were trained on; () if there are none.

  Args:
    data_name: name of the run's data.

  Raises:
    UserError: the run's data hold records that the features were trained on.

  >>> trained_on("vgg16_linear", "cifar10"), trained_on("scatter_linear", "cifar10")
  (('ImageNet',), ())
  """
  network = registry.entry(model).features or ""
  of_texts = network in sentence_encoder.ENCODERS
  if not of_texts and network not in public_trunks.TRUNKS:
    return ()
  known: Any = sentence_encoder.ENCODERS if of_texts else public_trunks.TRUNKS
  knows = known[network].knows
  if data_name.startswith(_OF_SENTENCES if of_texts else _OF_IMAGENET):
    raise UserError(
      f"its features were trained on {knows}, whose records are in data.name="
      f"{data_name!r}; no epsilon would hold, so data or model must be others",
      field="model.name",
      value=model,
    )
  return (knows,)


def add_note(
  promised: guarantee.Guarantee, model: str, known: Sequence[str]
) -> guarantee.Guarantee:
  """Returns the guarantee as a claim, which names the data that the features were trained on.

  Args:
    known: result of `trained_on`; () leaves the guarantee as it is.
  """
  if not known:
    return promised
  network = registry.entry(model).features
  data_sets = ", ".join(known)
  note = (
    f"Features. The inputs of the model are features of the public network {network}, which "
    f"was trained on {data_sets}. Nothing is promised to records that are in those data, too; "
    "that there are none is assumed, not checked."
  )
  assumed = f"no record of this run is known to {network}, which was trained on {data_sets}"
  wrapped = paragraph(note)
  return guarantee.add_note(promised, wrapped, assumed)


def describe_features(
  config: ModelConfig, dataset: data.Dataset, standardized: bool
) -> features.ComputedFeatures:
  """Returns a description of the features of a data set; its `make` computes them.

  Raises:
    UserError: no images; for a network that reads sentences: no texts as bytes, or `mirrored`.
  """
  # Features of a public network are always standardised.
  del standardized
  trunk = registry.entry(config.name).features or ""
  if trunk in sentence_encoder.ENCODERS:
    return _of_texts(config, dataset, trunk)
  features.check_images(dataset, "model.name", config.name)
  shape = public_trunks.trunk_shape(trunk, dataset.x.shape)
  chunks = functools.partial(
    public_trunks.trunk_chunks, dataset.x, trunk, mirrored=config.mirrored
  )
  # The settings hold the digest of the weights, since other weights give other features.
  network = public_trunks.TRUNKS[trunk]
  settings = (shape, trunk, network.sha256, network.size, config.mirrored)
  return features.ComputedFeatures(shape, settings, _CODE, chunks)


def _of_texts(
  config: ModelConfig, dataset: data.Dataset, encoder: str
) -> features.ComputedFeatures:
  is_bytes = dataset.vocab_size == text.VOCAB_SIZE and len(dataset.x.shape) == 2
  if dataset.x.dtype != np.int32 or not is_bytes:
    raise UserError(
      f"needs texts as bytes, which data without a tokenizer give, not {dataset!r}",
      field="model.name",
      value=config.name,
    )
  if config.mirrored:
    raise UserError("is of images", field="model.mirrored", value=True)
  shape = sentence_encoder.sentence_shape(encoder, dataset.x.shape)
  chunks = functools.partial(sentence_encoder.sentence_chunks, dataset.x, encoder)
  known = sentence_encoder.ENCODERS[encoder]
  settings = (shape, encoder, known.weights_sha256, known.tokenizer_sha256)
  return features.ComputedFeatures(shape, settings, _CODE_OF_TEXTS, chunks)
