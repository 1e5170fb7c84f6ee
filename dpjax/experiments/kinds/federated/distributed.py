"""privacy="distributed": every client adds a share of the noise inside a secure sum."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from dpjax import accounting
from dpjax.accounting.calibration import Unreachable
from dpjax.accounting.proved import NeighboringRelation
from dpjax.accounting.text import paragraph
from dpjax.experiments.config import common
from dpjax.experiments.config.choices import name_of
from dpjax.experiments.kinds import privacy_section
from dpjax.experiments.kinds.federated.config import (
  Distributed,
  FedConfig,
  algorithm_of,
  algorithms_that,
)
from dpjax.experiments.run.guarantee import Guarantee, add_note, of_event
from dpjax.secure.distributed_noise import SkellamSum
from dpjax.validate import UserError

_RELATION = NeighboringRelation.REPLACE_SPECIAL

_WHOM = (
  "Against a server that follows the protocol, and whoever sees what it releases: it gets the "
  "sum of the clients' integers, which holds the noise of at least {least} of {cohort} clients, "
  "and nothing else, as far as the secure sum hides the rest. Every round is charged to every "
  "client, also a round that was refused because fewer were left: the server knows who takes "
  "part, so sampling amplifies nothing. Who takes part and who falls silent must not depend on "
  "the data. A client that tells the server its share of the noise, or adds none, takes 1/{least} "
  "of the variance away."
)
_SIMULATED = (
  "SIMULATED SECURE SUM: in this run one program added the messages in the clear, and held all "
  "data and the key of all noise. What is said below holds for what the run RELEASED; nothing "
  "is promised against whoever ran it."
)
_PROTOCOL = (
  "In this run the protocol ran in every round, but one program simulated server and clients: "
  "it held all data and the key of all noise, so nothing is promised against whoever ran it."
)
_RELEASE = (
  "Release mode. Noise and rounding are drawn by NumPy's Philox, with a key of 128 bits for each "
  "client and round, hashed from 256 bits of the operating system's entropy. These are kept in "
  "the checkpoints only: delete them, or keep them as secret as the data. Philox is not a "
  "cryptographic generator. Integer noise has no lattice of floating point; that NumPy's Poisson "
  "sampler, whose rejection is in float64, has the probabilities of the ideal distribution to "
  "the last bit is not proved. Per-client diagnostics were switched off."
)


def check(config: FedConfig) -> None:
  """Raises UserError for fields that do not fit method "distributed"; loads no data."""
  if not isinstance(config.privacy, Distributed):
    return
  if not config.is_summed:
    raise UserError(
      "needs a secure_sum, such as --config.secure_sum=secagg: a share of the "
      "noise alone does not hide a message",
      field="privacy",
      value="distributed",
    )
  if name_of(config, "secure_sum") == "bfv":
    raise UserError(
      "must be another one for privacy='distributed': a client decrypts "
      "the sum before it is reduced modulo 2^32, and so learns more than the "
      "noise hides",
      field="secure_sum",
      value="bfv",
    )
  size = config.clients_per_round
  if size != int(size):
    raise UserError(
      "must be an integer for privacy='distributed', whose noise is sized for the number of "
      "clients",
      field="clients_per_round",
      value=size,
    )
  common.read_if(
    config,
    False,
    "another privacy than 'distributed', which clips to privacy.l2_clip_norm",
    "secure_sum.largest_value",
  )
  # Clip norm and noise cover one difference of parameters. Other parts of a message would need a
  # clip norm and noise, too.
  if not algorithm_of(config).one_difference:
    known = algorithms_that(lambda row: row.one_difference)
    common.only(config, "algorithm", known, " for privacy='distributed'")


def mechanism(config: FedConfig, num_parameters: int) -> SkellamSum | None:
  """Returns the mechanism of one round; None for another privacy.

  Its noise is `noise_multiplier` if given, else calibrated to `attacker` if given, else to
  `epsilon`. Raises UserError if `secure_sum.bits` are too few for this calibration.
  """
  privacy = config.privacy
  if not isinstance(privacy, Distributed):
    return None
  numbers: dict[str, Any] = {
    "l2_clip_norm": privacy.l2_clip_norm,
    "dim": num_parameters,
    "bits": config.secure_sum.bits,
    "max_clients": int(config.clients_per_round),
    "min_survivors": config.secure_sum.min_survivors(config.clients_per_round),
  }
  of = lambda z: SkellamSum.sized(noise_multiplier=z, **numbers)
  # Rounding enlarges the sensitivity by an amount that depends on the grid, and so on the noise.
  run_event = lambda z: accounting.compose(of(z).event, config.num_rounds)
  try:
    return of(
      privacy_section.noise_multiplier(
        privacy, run_event, neighboring_relation=_RELATION, accountant="rdp"
      )
    )
  except Unreachable as error:
    wanted = f"epsilon={privacy.epsilon!r}" if privacy.epsilon else "attacker"
    raise UserError(
      f"so coarse a grid cannot reach privacy.{wanted}: {error}",
      field="secure_sum.bits",
      value=config.secure_sum.bits,
    ) from error


def seed_of(key: jax.Array) -> int:
  """Returns all bits of a key, as a seed for NumPy."""
  return int.from_bytes(np.asarray(jax.random.key_data(key)).tobytes(), "little")


def guarantee(
  config: FedConfig, noise_in_shares: SkellamSum, num_clients: int
) -> Guarantee:
  """Returns the guarantee for one client of `num_clients`, under replace_special."""
  asked = config.privacy
  assert isinstance(asked, Distributed)
  promised = of_event(
    noise_in_shares.event,
    delta=asked.delta,
    l2_bound=noise_in_shares.l2_clip_norm,
    num_records=num_clients,
    relation=_RELATION,
    # Sampling amplifies nothing: the guarantee is against the server, which knows who takes part.
    num_steps=config.num_rounds,
    accountant="rdp",
    unit="user",
    budget=asked.epsilon_budget,
    release=config.release,
  )
  least = noise_in_shares.noise.min_survivors
  words = [
    _SIMULATED if config.secure_sum.simulated else _PROTOCOL,
    _WHOM.format(least=least, cohort=noise_in_shares.max_clients),
    _RELEASE if config.release else "",
  ]
  return add_note(promised, "\n\n".join(paragraph(text) for text in words if text))
