"""What must be refuted: subtle twins of everything that has a game, with half of the noise or so.

The plain ones, with a tenth of it, stand in `tests/adversary/twins.py`.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np

from dpjax import secure
from dpjax.federated import compression
from dpjax.secure.distributed_noise import SkellamSum
from tests.adversary import twins

# What is drawn / what is stated, by package, or by package and kind of subject.
_NOISE = {
  "mechanisms": 1 / 2.5,
  "samplers": 1 / 2,
  "transforms": 1 / 2,
  "federated": 1 / 2,
  "silos": 1 / 2,
  "plans": 1 / 2,
  "training": 1 / 2,
  "vertical": 1 / 2,
  "shares": 1 / 2,
  "accounting": 1 / 2.5,
  "secure": 1 / 4,
  "relevance.features": 1 / 3,
  "relevance.relevance": 1 / 4,
  "relevance.labels": 1 / 2.5,
  "relevance.method": 1 / 2,
  "relevance.method:radp_rigorous": 1 / 3,
}


def games(package, name):
  """The games of a subject whose noise is too little, the strongest first."""
  full = f"{package}.{name}"
  noise = next(_NOISE[n] for n in (full, full.partition(":")[0], package) if n in _NOISE)
  return twins.PACKAGES[package](name, twins.Plant(noise=noise))


def weak(kind):
  """A class of mechanisms that draws with 2.5 times the epsilon that it states."""
  plant = twins.Plant(noise=_NOISE["mechanisms"])
  return lambda **settings: twins.BrokenMechanism(kind, "", plant, settings)


# --- noise inside a secure sum: what is charged is that of the honest mechanism


def sized_for_more_clients(factor):
  """Shares of which `factor` times as many as there are make up the noise."""

  def broken(protocol, mechanism, **options):
    noise = mechanism.noise
    less = dataclasses.replace(noise, share_variance=noise.share_variance / factor)
    quiet = dataclasses.replace(mechanism, noise=less)
    return secure.skellam_mean(protocol, quiet, **options)

  return broken


@dataclasses.dataclass(frozen=True)
class _RoundedUp(SkellamSum):
  """Rounds away from zero, and then does not ask how long the vector has become."""

  def encode(self, rng, vector, signs):
    with np.errstate(invalid="ignore"):
      length = np.linalg.norm(vector)
    if not length > 0:
      return np.zeros(self.padded_dim, np.int64)
    clipped = vector * min(1.0, self.l2_clip_norm / length)
    rotated = np.asarray(compression.rotate(signs, jnp.asarray(clipped, jnp.float32)))
    scaled = self.scale * rotated
    return (np.sign(scaled) * np.ceil(np.abs(scaled))).astype(np.int64)


def rounded_up(protocol, mechanism, **options):
  fields = {f.name: getattr(mechanism, f.name) for f in dataclasses.fields(mechanism)}
  return secure.skellam_mean(protocol, _RoundedUp(**fields), **options)
