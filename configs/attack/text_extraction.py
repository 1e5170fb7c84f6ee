"""Names and numbers out of a small language model: it writes, and its lines are ranked.

  python -m launch.attack --config=configs/attack/text_extraction.py --workdir=runs/text

The text is 600 lines of Python's own reference, which every Python carries. Invented records, a
name with a number each, take the place of some lines: eight records once, eight four times, eight
sixteen times, and eight others never. The model writes 400 lines, which are ranked as in Carlini
et al. 2021. Text, model and lines are small, so that ten runs cost 8 minutes of processor time.

Hardware: 2 CPU cores beside very much other work; 17 s of processor time for each training.
Seen in ten runs each (configs/sweeps/text_extraction.py): of the first 10 lines by perplexity over
zlib 4.9 +- 1.5 are records without a defence, 7.7 +- 1.1 with clipping, none in any run at epsilon
8, where the next byte is right .204 of the time in place of .273. But for one record in two of ten
runs, all that were found are among the eight that stand there sixteen times.
"""

from __future__ import annotations

from collections.abc import Iterator
from pydoc_data.topics import topics
from typing import Any

import numpy as np

from dpjax import data
from dpjax.data import text
from dpjax.experiments.config import fields
from dpjax.experiments.kinds.attack.config import AttackConfig
from dpjax.experiments.kinds.attack.written_text import WrittenText
from dpjax.experiments.kinds.central.config import (
  DataConfig,
  ModelConfig,
  OptimizerConfig,
  Sgd,
  TrainConfig,
)

_LENGTH = 40
_TRAIN = 600


def load_reference() -> tuple[data.Dataset, data.Dataset]:
  """Loads (train, test): lines of Python's reference, cut, as bytes, in a fixed random order."""
  every = {line.strip() for topic in topics.values() for line in topic.split("\n")}
  lines = sorted(line for line in every if len(line) >= 12)
  tokens = text.encode_text(lines, max_length=_LENGTH)
  tokens = tokens[np.random.default_rng(0).permutation(len(tokens))]
  parts = {"train": tokens[:_TRAIN], "test": tokens[_TRAIN : _TRAIN + 500]}
  train, test = (
    data.from_arrays(
      x,
      np.zeros(len(x), np.int32),
      num_classes=1,
      vocab_size=text.VOCAB_SIZE,
      name="python_reference",
      split=split,
      nominal_size=_TRAIN if split == "train" else None,
    )
    for split, x in parts.items()
  )
  return train, test


def get_config() -> AttackConfig:
  """The attack, and a transformer of one block that is attacked."""
  sizes = dict(num_layers=1, num_heads=4, features=32, max_length=_LENGTH)
  return AttackConfig(
    attack=WrittenText(num_lines=400),
    target=TrainConfig(
      data=DataConfig(name="configs.attack.text_extraction:load_reference"),
      model=ModelConfig(name="transformer", options=sizes),
      privacy=Sgd(sampling_prob=0.05),
      optimizer=OptimizerConfig(rule="adam", learning_rate=6e-3),
      num_steps=400,
    ),
  )


def get_configs(base: AttackConfig) -> Iterator[tuple[str, AttackConfig]]:
  """Without a defence, with clipping alone, and with a proved epsilon."""
  clipped = {"target.privacy": "dp_sgd", "target.privacy.l2_clip_norm": 0.5}
  noise = {"target.privacy.epsilon": None, "target.privacy.noise_multiplier": 0.0}
  defences: dict[str, dict[str, Any]] = {
    "none": {},
    "clipping": {**clipped, **noise},
    "epsilon 8": {**clipped, "target.privacy.epsilon": 8.0},
  }
  for defence, changes in defences.items():
    yield f"text extraction, {defence}", fields.replace_all(base, changes)
