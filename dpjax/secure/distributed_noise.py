"""Differential privacy inside a secure sum: every client adds a share of the noise.

  client:  clip to C -> rotate (public random signs) -> scale -> round -> + Skellam share
           -> modulo 2^32 or 2^64 -> secure sum
  server:  modulo 2^bits, unwrap -> / scale -> rotate back -> / survivors

The noise of the SUM is that of a trusted server: shares of Skellam noise add up to Skellam noise
(Agarwal, Kairouz and Liu 2021, arXiv:2110.04995; rotation, rounding and modulus as Kairouz, Liu
and Steinke 2021, arXiv:2102.06387, algorithm 1).

| what could void the guarantee        | what is done                                         |
| ------------------------------------ | ---------------------------------------------------- |
| rounding makes a vector longer       | the sensitivity is that after rounding               |
| clients fall silent, with their noise| noise fits the fewest survivors; fewer are refused   |
| a client without message, or with NaN| sends zeros and its share of the noise, all the same |
| a neighbour without the client       | would lack a share: the relation is zero-out         |
|                                      | (replace_special), or replace_one; never add/remove  |
| sampling of cohorts                  | the server knows who takes part: nothing is amplified|
| the sum wraps around                 | post-processing; `wrap_probability` bounds the chance|

The guarantee holds against the server, and against anyone who sees what the server releases. It
requires that everybody follows the protocol (honest but curious), and that the secure sum hides all
but the sum. A client that tells the server its share of the noise takes 1 / min_survivors of the
accounted variance away, and so does a client that adds no share.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpjax import trees, validate
from dpjax.accounting.discrete import DistributedNoise, l1_sensitivity
from dpjax.accounting.event_kinds.skellam import SkellamDpEvent
from dpjax.federated.aggregation import Aggregator
from dpjax.federated.client import ClientAlgorithm
from dpjax.federated.cohort import Cohort
from dpjax.federated.compression import rotate, unrotate
from dpjax.federated.execution.context import Context, MapClients, Mapped, Run
from dpjax.noise import discrete
from dpjax.secure.encoding import BITS
from dpjax.secure.summation import (
  NO_DROPOUT,
  Dropout,
  carry_out,
  through_sum,
  with_cost,
)
from dpjax.secure.sums import BfvSum, Drops
from dpjax.secure.sums.interface import NO_DROPS, Summed, SumProtocol, dtype_of
from dpjax.types import HostArray
from dpjax.validate import UserError

# Planned chance, in one round, that ANY coordinate exceeds its bound. The noise and the rotated sum
# of vectors have this chance each.
_CHANCE = 1e-6
_rotate = jax.jit(rotate)
_unrotate = jax.jit(unrotate, static_argnums=2)
# `fold_in` is compiled into one program. Otherwise it runs several small ones.
_fold_in = jax.jit(jax.random.fold_in)


@dataclasses.dataclass(frozen=True)
class SkellamSum:
  """Parameters of the mechanism of one round; `sized` chooses them.

  Args:
    l2_clip_norm: bound on the norm of one client's message, in units of the message.
    dim: number of coordinates of a message.
    scale: number of grid points per unit.
    bits: bits of the modulus, 8 to 32.
    max_clients: largest number of clients of one sum; public.
    noise: variance of a client's share, and the fewest shares of a sum.

  >>> sum_of = SkellamSum.sized(noise_multiplier=1.0, l2_clip_norm=1.0, dim=4096, bits=16,
  ...   max_clients=100, min_survivors=100)
  >>> round(sum_of.scale), sum_of.wrap_probability < 1e-5
  (1887, True)
  """

  l2_clip_norm: float
  dim: int
  scale: float
  bits: int
  max_clients: int
  noise: DistributedNoise

  def __post_init__(self):
    validate.positive(l2_clip_norm=self.l2_clip_norm, scale=self.scale)
    validate.integer_at_least(1, dim=self.dim)
    validate.integer_in(*BITS, bits=self.bits)
    validate.integer_at_least(self.noise.min_survivors, max_clients=self.max_clients)

  @classmethod
  def sized(
    cls,
    *,
    noise_multiplier: float,
    l2_clip_norm: float,
    dim: int,
    bits: int,
    max_clients: int,
    min_survivors: int,
  ) -> SkellamSum:
    """Returns the mechanism with the finest grid that the modulus and the exact sampler allow.

    Args:
      noise_multiplier: std of the sum of `min_survivors` shares, divided by l2_clip_norm.

    Raises:
      UserError: too few bits for so many clients.
    """
    validate.positive(noise_multiplier=noise_multiplier, l2_clip_norm=l2_clip_norm)
    validate.integer_in(*BITS, bits=bits)
    validate.integer_at_least(1, min_survivors=min_survivors)
    validate.integer_at_least(min_survivors, max_clients=max_clients)
    # Up to max_clients clients add shares that are sized for min_survivors. So a sum may have more
    # noise than min_survivors shares.
    most = noise_multiplier * math.sqrt(max_clients / min_survivors)
    scale = discrete.scale_for(
      l2_clip_norm=l2_clip_norm,
      noise_multiplier=most,
      num_clients=max_clients,
      bits=bits,
      # By a union bound, Gaussian noise stays within this many standard deviations in every
      # coordinate, except with chance _CHANCE. `wrap_probability` has the bound for Skellam noise.
      num_stds=math.sqrt(2 * math.log(2 * _padded_dim(dim) / _CHANCE)),
      spread=discrete.rotated_spread(_padded_dim(dim), chance=_CHANCE),
    )
    # Above a variance of MAX_SKELLAM the sampler is not exact. The limit is lowered slightly, since
    # variances of shares are rounded when they are added.
    limit = (1 - 1e-9) * discrete.MAX_SKELLAM
    scale = min(scale, math.sqrt(limit) / (most * l2_clip_norm))
    total = (noise_multiplier * l2_clip_norm * scale) ** 2
    noise = DistributedNoise.sized(total_variance=total, min_survivors=min_survivors)
    return cls(l2_clip_norm, dim, scale, bits, max_clients, noise)

  @property
  def padded_dim(self) -> int:
    """Number of integers that a client sends: `dim`, rounded up to a power of two."""
    return _padded_dim(self.dim)

  @property
  def l2_sensitivity(self) -> float:
    """Largest norm that the rounding allows for a client's integers, before noise."""
    return discrete.rounded_norm_bound(self.scale * self.l2_clip_norm, dim=self.padded_dim)

  @property
  def event(self) -> SkellamDpEvent:
    """Event of one round with the fewest survivors; a refused round must be accounted, too.

    Guarantee: it holds for one CLIENT under replace_special (its message is exchanged for zeros)
    and replace_one. A round with more survivors has more noise, so it costs no more.
    """
    l2 = self.l2_sensitivity
    variance = self.noise.share_variance * self.noise.min_survivors
    return SkellamDpEvent(variance, l2, l1_sensitivity(l2, self.padded_dim))

  @property
  def noise_multiplier(self) -> float:
    """Standard deviation of a sum of `min_survivors` shares, divided by scale * l2_clip_norm."""
    variance = self.noise.share_variance * self.noise.min_survivors
    return math.sqrt(variance) / (self.scale * self.l2_clip_norm)

  @property
  def wrap_probability(self) -> float:
    """Upper bound on the chance that a round's sum wraps around in any coordinate."""
    spread = discrete.rotated_spread(self.padded_dim, chance=_CHANCE)
    # Rounding adds less than 1 to a coordinate of each client.
    largest = self.max_clients * (self.scale * self.l2_clip_norm * spread + 1)
    beyond = discrete.wrap_probability(
      modulus=2**self.bits,
      largest_sum=largest,
      variance=self.noise.share_variance * self.max_clients,
      dim=self.padded_dim,
      noise="skellam",
    )
    # No coordinate exceeds the norm, so a spread of 1 never fails. A smaller one fails with a
    # chance of at most _CHANCE.
    return min(1.0, beyond + (_CHANCE if spread < 1 else 0.0))

  def encode(
    self, rng: np.random.Generator, vector: HostArray, signs: jax.Array
  ) -> np.ndarray:
    """Encodes [dim] floats as [padded_dim] int64 of norm <= `l2_sensitivity`, before noise.

    Args:
      vector: [dim] floats of any size. A vector with NaN or infinity becomes zeros.
      signs: public key of the round's rotation.

    Raises:
      UserError: a vector of complex numbers.
    """
    # NumPy would drop the imaginary part of a complex number.
    if np.iscomplexobj(vector):
      raise UserError("must be real numbers", field="vector", value=np.result_type(vector))
    vector = np.asarray(vector, np.float64)
    # The client sends zeros, with the usual share of noise: silence would reveal the failure.
    if not np.isfinite(vector).all():
      return np.zeros(self.padded_dim, np.int64)
    # A norm beyond float64 is infinite, and shortens the vector to 0.
    with np.errstate(over="ignore"):
      norm = float(np.linalg.norm(vector))
    clipped = vector * min(1.0, self.l2_clip_norm / norm if norm > 0 else 1.0)
    rotated = np.asarray(_rotate(signs, clipped.astype(np.float32)))
    # The rotation runs in float32, whose range a finite float64 may exceed.
    if not np.isfinite(rotated).all():
      return np.zeros(self.padded_dim, np.int64)
    return discrete.encode(rng, rotated, l2_clip_norm=self.l2_clip_norm, scale=self.scale)

  def share(self, rng: np.random.Generator, shares: int = 1) -> np.ndarray:
    """Draws [padded_dim] int64, the sum of `shares` shares of noise. Only the client that adds
    the noise may know `rng`."""
    variance = self.noise.share_variance * shares
    return discrete.skellam(rng, self.padded_dim, variance=variance)

  def decode(self, total: np.ndarray, signs: jax.Array) -> np.ndarray:
    """Decodes [padded_dim] integers modulo 2^bits to the noisy sum of messages, [dim] float32."""
    # The total is reduced modulo 2^bits, which divides the protocol's modulus.
    low = (total & total.dtype.type(2**self.bits - 1)).astype(np.int64)
    decoded = discrete.decode(low, modulus=2**self.bits, scale=self.scale)
    return np.asarray(_unrotate(signs, decoded.astype(np.float32), self.dim))


def _padded_dim(dim: int) -> int:
  return 1 << max(0, (dim - 1).bit_length())


# --- federated rounds


def skellam_mean(
  protocol: SumProtocol,
  mechanism: SkellamSum,
  *,
  seed: int,
  rotation: int = 0,
  dropout: Dropout = NO_DROPOUT,
) -> Aggregator:
  """Returns an aggregator for the private mean of the survivors' messages, by a secure sum.

  A plan without an epsilon draws its cohorts (`Aggregator.drawn_by`): a plan's own epsilon would
  count on noise that is not added here.

  Args:
    protocol: the secure sum. With a simulated one the noise of all survivors is one draw, since
      shares of Skellam noise add up to Skellam noise; any other gets each client's noisy integers.
      The protocol's `min_survivors` must be at least that of `mechanism.noise`.
    mechanism: mechanism of one round.
    seed: seed of all noise and rounding, 128 bits or more; as secret as the data. Each client of
      each round has a stream of its own (NumPy's Philox), and so has each run whose cohorts are
      drawn afresh.
    rotation: public seed of the random signs of the rotations.
    dropout: rule by which clients fall silent, in a simulation.

  Guarantee: one round costs a client at most `mechanism.event`, under replace_special and
  replace_one, against a server that sees the sum alone. It holds for any message and any weight,
  which is applied before the clip, as in `dp_mean`. Who takes part and who falls silent is public
  and must not depend on the data. For a simulated protocol this holds for the OUTPUT alone:
  whoever runs it sees all messages.

  Raises:
    UserError: a protocol with a smaller `min_survivors` or fewer bits than the mechanism, one that
      adds no integers modulo 2^bits, or one that shows somebody the sum before it is reduced (BFV).
      Raised by the algorithm that takes it: a client that sends noise without examples
      (`client_noise`).
  """
  validate.integer_at_least(0, seed=seed, rotation=rotation)
  _check_protocol(protocol, mechanism)
  total = functools.partial(_total, protocol, mechanism)
  signs_key = jax.random.key(rotation)

  def init(message: Any) -> Any:
    if trees.size(message) != mechanism.dim:
      raise UserError(
        f"a message holds {trees.size(message)} numbers", field="dim", value=mechanism.dim
      )
    return jnp.int32(0)

  def mean(
    sent: Any, weights: Any, ids: Sequence[int], round: int, drops: Drops, run: int = 0
  ) -> Any:
    signs = _fold_in(signs_key, np.uint32(round))
    sent = jax.device_get(sent)
    row = functools.partial(_row, sent, np.asarray(weights))
    encode = lambda place, rng: mechanism.encode(rng, row(place), signs)
    result = total(_seed_of_run(seed, run), encode, list(ids), round, drops)
    flat = mechanism.decode(result.total, signs) / np.float32(len(ids))
    sums = trees.unflatten(flat, jax.tree.map(lambda leaf: leaf[0], sent))
    return jax.tree.map(jnp.asarray, sums), result

  def update(messages: Any, mask: Any, state: Any, weights: Any = None) -> Any:
    kept = np.flatnonzero(np.asarray(mask))
    taken = lambda leaf: np.asarray(leaf)[kept]
    weights = np.ones(len(np.asarray(mask))) if weights is None else weights
    rows = jax.tree.map(taken, messages)
    # Clients are counted before any draw: fewer shares would be less noise than accounted.
    mechanism.noise.check_survivors(len(kept))
    validate.integer_in(1, mechanism.max_clients, num_clients=len(kept))
    sums, _ = mean(rows, taken(weights), range(len(kept)), int(state), NO_DROPS)
    return sums, state + 1

  def sum_of(run: Run, context: Context, cohort: Cohort, drops: Drops) -> Mapped:
    mapped = run(context, cohort)
    ids = [int(client) for client in cohort.ids]
    sent = mapped.sent
    round = int(context.state)
    number = 0 if cohort.drawn is None else max(0, cohort.drawn.run)
    sums, summed = mean(sent.message, sent.weight, ids, round, drops, number)
    return with_cost(mapped, summed)._replace(sums=sums, sent=None)

  def through(inner: MapClients) -> MapClients:
    # The protocol's `min_survivors` is no smaller than that of the noise (`_check_protocol`).
    summed_by = through_sum(
      sum_of, dropout, protocol, inner, max_clients=mechanism.max_clients
    )

    def bind(client: ClientAlgorithm, partial: Any) -> Run:
      # Under replace_special the twin of a client must send zeros. One that sends noise, clipped
      # like the client's message, is up to two clip norms away.
      if client.apart_from_empty:
        raise UserError(
          "must add no noise of its own: without examples it would still send it, and the noise "
          "of the sum is sized for zeros in its place",
          field="client",
        )
      return summed_by(client.silent_when_empty(), partial)

    return bind

  return Aggregator(
    init,
    update,
    finish=lambda sums, state: (sums, state + 1),
    private=True,
    through=through,
    min_clients=protocol.min_clients,
  )


Encode = Callable[[int, np.random.Generator], np.ndarray]  # (place, rng) -> integers


def _check_protocol(protocol: SumProtocol, mechanism: SkellamSum) -> None:
  if isinstance(protocol, BfvSum):
    raise UserError(
      "must be another one: a client decrypts the sum before it is reduced "
      f"modulo 2^{protocol.bits}, and so learns more than the noise hides",
      field="protocol",
      value=protocol.name,
    )
  if protocol.dtype.kind != "u":
    raise UserError("must add up integers modulo 2^bits", field="protocol", value=protocol)
  if protocol.bits < mechanism.bits:
    raise UserError(
      f"must be <= {protocol.bits} of {protocol.name}", field="bits", value=mechanism.bits
    )
  if protocol.min_survivors < mechanism.noise.min_survivors:
    raise UserError(
      f"must be >= {mechanism.noise.min_survivors}, for which the noise was sized",
      field="min_survivors",
      value=protocol.min_survivors,
    )


def _total(
  protocol: SumProtocol,
  mechanism: SkellamSum,
  seed: int,
  encode: Encode,
  ids: list[int],
  round: int,
  drops: Drops,
) -> Summed:
  """Sums [padded_dim] integers of the clients `ids`, who all upload.

  Each vector wraps around modulo 2^protocol.bits, so the total is a function of the noisy sum.
  Residues modulo the mechanism's smaller 2^bits would add 2^bits for each client with a negative
  number. No noise hides the number of such clients, so only the total is reduced (`decode`).
  """
  places = {client: place for place, client in enumerate(ids)}
  kind = dtype_of(protocol.bits)
  zeros = np.zeros(mechanism.padded_dim, kind)
  if protocol.is_simulated:
    summed = carry_out(protocol, ids, drops, lambda client: zeros)
    # Shares of Skellam noise add up exactly to Skellam noise, so one draw serves all.
    noisy = mechanism.share(_stream(seed, round), len(ids))
    for client, place in places.items():
      noisy += encode(place, _stream(seed, round, client))
    return summed._replace(total=noisy.astype(kind))

  def vector(client: int) -> np.ndarray:
    # A protocol may also ask for the vector of a client that dropped out. It is never sent.
    if client not in places:
      return zeros
    rng = _stream(seed, round, client)
    noisy = encode(places[client], rng) + mechanism.share(rng)
    # The conversion wraps around modulo the protocol's modulus (see the docstring of `_total`).
    return noisy.astype(kind)

  return carry_out(protocol, ids, drops, vector)


def _seed_of_run(seed: int, run: int) -> int:
  """Returns the seed of a run; of run 0, whose draws may be repeated, `seed` itself.

  Two runs with one seed would share their noise, which cancels in the difference of two sums."""
  if not run:
    return seed
  # Streams of rounds and clients have one or two numbers, so three are those of a run.
  words = np.random.SeedSequence(seed, spawn_key=(run, 0, 0)).generate_state(8, np.uint32)
  return int.from_bytes(words.tobytes(), "little")


def _stream(seed: int, *which: int) -> np.random.Generator:
  """Returns the random generator of (round, client), or of a whole round if no client is given."""
  words = np.random.SeedSequence(seed, spawn_key=which)
  return np.random.Generator(np.random.Philox(words))


def _row(sent: Any, weights: np.ndarray, place: int) -> np.ndarray:
  """Returns the weighted message of one client, flat; zeros if its weight is 0."""
  leaves = [np.ravel(np.asarray(leaf[place], np.float64)) for leaf in jax.tree.leaves(sent)]
  flat = np.concatenate(leaves)
  weight = float(weights[place])
  # A warning would reveal that this client's message is not finite.
  with np.errstate(all="ignore"):
    return np.zeros_like(flat) if weight == 0 else flat * weight
