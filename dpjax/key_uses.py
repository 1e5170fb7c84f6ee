"""What one key is used for beside its steps: a number for each use, in one table.

`jax.random.fold_in(key, number)` makes a key for each step, row or layer, which are counted from 0
on. JAX's own keys have `split(key, n)[i] == fold_in(key, i)`, so a split takes the same numbers. A
use that is counted by nothing takes its number from `KeyUse`: two uses of one key cannot share it,
and no counter reaches it.
"""

from __future__ import annotations

import enum

import jax
import numpy as np

from dpjax.types import Array


class KeyUse(enum.IntEnum):
  """Uses of a key, each with a number in [2^31, 2^32) that only this use has.

  New uses are added at the end, so that all others keep their random numbers.

  >>> KeyUse.STATISTICS == 2**32 - 1, KeyUse.PAIRS != KeyUse.STATISTICS
  (True, True)
  """

  @staticmethod
  def _generate_next_value_(name: str, start: int, count: int, last_values: list) -> int:
    del name, start, last_values
    return 2**32 - 1 - count

  # Of a noise key, beside the draws of noise.
  STATISTICS = enum.auto()  # statistics of the data, before the first step
  CLIENTS = enum.auto()  # everything random on clients
  PAIRS = enum.auto()  # secret keys of the pairs of an adversarial training
  VOTE_COST = enum.auto()  # the published cost of a PATE run
  # Of a client's key.
  CLIENT_OPTIMIZER = enum.auto()
  CLIENT_NOISE = enum.auto()
  CLIENT_ROUNDING = enum.auto()
  PERSONAL_OPTIMIZER = enum.auto()
  # Of an example's key.
  MODEL = enum.auto()  # a model's own draws, beside those of augmentations
  MODEL_PARAMS = enum.auto()  # a linen model's draws that are no dropout
  MODEL_STREAMS = enum.auto()  # streams that an nnx model takes as an argument
  # Of a run's public key, which makes its first parameters.
  ADAPTERS = enum.auto()  # first parameters of adapters beside those of the model
  PARAMETERS = enum.auto()  # first parameters of several networks
  HEAD = enum.auto()  # first parameters of a last layer beside those of the model
  PUBLIC_STEPS = enum.auto()  # public steps: of a student, or of a generator
  SAMPLES = enum.auto()  # samples of a generator
  CLASS_PICTURES = enum.auto()  # inputs from which a class is inverted
  # Of a relevance run's noise key.
  RECORD_AUDIT = enum.auto()  # noise of records that an audit plants
  BATCH_AUDIT = enum.auto()  # noise of batches that an audit plants
  CANARY_AUDIT = enum.auto()  # runs with canaries, after the run itself
  # Of a client's key.
  SILO_NOISE = enum.auto()  # noise on the steps of a silo in one round
  # Of a noise key.
  RUN = enum.auto()  # the noise key of each run whose draws are fresh


def key_for(use: KeyUse, key: Array) -> jax.Array:
  """Returns the key of one use of `key`.

  >>> key = jax.random.key(0)
  >>> bool(key_for(KeyUse.PAIRS, key) == key_for(KeyUse.STATISTICS, key))
  False
  """
  return jax.random.fold_in(key, np.uint32(use))
