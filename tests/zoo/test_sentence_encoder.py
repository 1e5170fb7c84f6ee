"""Sentence embeddings: the published network, on each text alone, and what a run says of it.

The oracle of the layers is BERT in NumPy and float64 (`test_published_layouts`). That of the
published weights are the similarities that sentence-transformers prints for its own example.
"""

from __future__ import annotations

import hashlib
import types

import numpy as np
import pytest

from dpjax import data
from dpjax.data import text
from dpjax.experiments.kinds.central import build, features, one_release
from dpjax.experiments.kinds.central.config import (
  DataConfig,
  DpSgd,
  LeastSquares,
  ModelConfig,
  TrainConfig,
)
from dpjax.experiments.run import model_inputs
from dpjax.zoo import networks
from dpjax.zoo.networks import sentence_encoder
from dpjax.zoo.networks.sentence_encoder import Encoder
from tests.refuses import refuses

save_file = pytest.importorskip("safetensors.numpy").save_file
from tests.zoo.test_published_layouts import CASES, bert_layers  # noqa: E402

_TENSORS = {
  name.removeprefix("bert."): array
  for name, array in CASES["bert"].tensors.items()
  if name.startswith("bert.")
}
_SIZES = {
  "vocab_size": 11,
  "num_layers": 2,
  "num_heads": 2,
  "features": 8,
  "mlp_features": 12,
  "max_length": 6,
}


class _Tokenizer:
  """Tokens of the letters a to h, between 1 and 2, as [CLS] and [SEP] are; at most six."""

  def encode_batch(self, texts):
    ids = [[1, *(3 + ord(letter) % 8 for letter in line[:4]), 2] for line in texts]
    return [types.SimpleNamespace(ids=row) for row in ids]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
  """A package of the published name with the weights of a tiny network; its file of weights."""
  with pytest.MonkeyPatch.context() as monkeypatch:
    yield _installed(tmp_path_factory.mktemp("site"), monkeypatch)
  sentence_encoder._weights.cache_clear()
  sentence_encoder.embed.clear_cache()


def _installed(site, monkeypatch):
  folder = site / sentence_encoder._PACKAGE
  (folder / "model").mkdir(parents=True)
  # Were the package imported, the test would end here.
  (folder / "__init__.py").write_text("raise SystemExit('imported')")
  path = folder / "model" / "model.safetensors"
  save_file(_TENSORS, path)
  sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
  encoder = Encoder(sha256, "0" * 64, _SIZES, "public text")
  monkeypatch.setitem(sentence_encoder.ENCODERS, "minilm", encoder)
  monkeypatch.setattr(sentence_encoder, "_LENGTHS", (3, 6))
  monkeypatch.setattr(sentence_encoder, "_tokenizer", lambda encoder: _Tokenizer())
  monkeypatch.syspath_prepend(str(folder.parent))
  sentence_encoder._weights.cache_clear()
  sentence_encoder.embed.clear_cache()
  return path


def _oracle(line):
  tokens = np.array(_Tokenizer().encode_batch([line])[0].ids)[None]
  mean = bert_layers(CASES["bert"].tensors, tokens)[0].mean(axis=0)
  return mean / np.linalg.norm(mean)


_LINES = ["", "a", "bad", "cafe", "hh", "bad", "decade"]


@pytest.mark.slow
def test_an_embedding_is_the_mean_of_the_last_layer_at_norm_one(tiny):
  got = networks.sentence_features(_LINES)
  wanted = np.stack([_oracle(line) for line in _LINES])
  np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)
  assert got.shape == (7, 8) and np.ptp(wanted, axis=0).min() > 0.01
  assert networks.sentence_features([]).shape == (0, 8)


def test_a_row_follows_from_its_own_text(tiny):
  whole = networks.sentence_features(_LINES)
  for place, line in enumerate(_LINES):
    others = ["h" * 9] * 3 + [line]
    np.testing.assert_allclose(
      networks.sentence_features(others)[-1], whole[place], rtol=1e-6, atol=1e-7
    )


def test_bytes_are_the_text_and_a_character_cut_in_two_is_left_out(tiny):
  rows = text.encode_text(["cafe", "ab\N{GRINNING FACE}"], max_length=4)
  got = np.concatenate([*sentence_encoder.sentence_chunks(rows)])
  np.testing.assert_array_equal(got, networks.sentence_features(["cafe", "ab"]))
  with refuses("x"):
    [*sentence_encoder.sentence_chunks(rows + 300)]
  with refuses("x"):
    [*sentence_encoder.sentence_chunks(rows.astype(np.float32))]


def test_other_weights_or_none_are_refused(tiny, monkeypatch):
  sentence_encoder._weights.cache_clear()
  whole = tiny.read_bytes()
  tiny.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
  with refuses("features"):
    networks.sentence_features(_LINES)
  tiny.unlink()
  with refuses("features"):
    networks.sentence_features(_LINES)
  tiny.write_bytes(whole)
  monkeypatch.setattr(sentence_encoder, "_PACKAGE", "no_such_package_anywhere")
  with refuses("features"):
    networks.sentence_features(_LINES)


def _pair():
  lines = ["abc", "hga", "bcd", "gfh"] * 6
  labels = np.array([0, 1] * 12, np.int32)
  rows = text.encode_text(lines, max_length=4)
  return tuple(
    data.Dataset(rows, labels, "reviews", 2, split, text.VOCAB_SIZE)
    for split in ("train", "test")
  )


def _config(privacy=DpSgd, **given):
  return TrainConfig(
    data=DataConfig(name="reviews.npz", num_examples=24),
    model=ModelConfig("minilm_linear"),
    privacy=privacy(epsilon=None, noise_multiplier=1.0, **given),
    num_steps=2,
  )


def test_a_run_says_what_its_features_know(tiny, tmp_path):
  config = _config(sampling_prob=0.5)
  loaded = build.Central(config).with_features(_pair())
  assert loaded[0].x.shape == (24, 8) and loaded[0].x.dtype == np.float32
  run = build.assemble(config, loaded)
  assert run.guarantee.kind == "claimed" and list(run.pretrained_on) == ["public text"]
  assert run.guarantee.failed_assumptions == (
    "no record of this run is known to minilm, which was trained on public text",
  )
  # A server is given texts, not their features.
  build.inputs_writer(config.data, config.model, loaded[1])(tmp_path)
  inputs = model_inputs.read(tmp_path)
  assert inputs is not None
  assert (inputs.dtype, inputs.shape, inputs.vocab_size) == ("int32", (4,), 256)


def test_a_release_at_once_says_it_too(tiny):
  config = _config(LeastSquares)
  loaded = build.Central(config).with_features(_pair())
  work = one_release.phase(config, loaded, build.Central(config).new_keys())
  assert work.guarantee.kind == "claimed"
  assert "public network minilm" in " ".join(work.guarantee.statement(1).split())
  assert work.planned()["pretrained_on"] == ["public text"]


def test_what_the_network_cannot_read_or_knows_already_is_refused(tiny):
  images = data.Dataset(
    np.zeros((2, 4, 4, 1), np.float32), np.zeros(2, np.int32), "a", 2, "t"
  )
  rows = text.encode_text(["ab", "cd"], max_length=4)
  words = data.Dataset(rows, np.zeros(2, np.int32), "a", 2, "t", 400)
  for dataset in (images, words):
    with refuses("model.name"):
      features.add_features(ModelConfig("minilm_linear"), dataset)
  with refuses("model.mirrored", value=True):
    features.add_features(ModelConfig("minilm_linear", mirrored=True), _pair()[0])
  with refuses("model.name"):
    features.trained_on("minilm_linear", "snli")
