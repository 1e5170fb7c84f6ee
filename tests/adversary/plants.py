"""What must be refuted: broken twins of everything that has a game."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from dpjax import federated, mechanisms, sampling, secure, transforms
from dpjax.auditing.games import federated as federated_games
from dpjax.auditing.games import mechanisms as mechanism_games
from dpjax.auditing.games import relevance as relevance_games
from dpjax.auditing.games import samplers as sampler_games
from dpjax.auditing.games import secure as secure_games
from dpjax.auditing.games import transforms as transform_games
from dpjax.federated import compression
from dpjax.plan import Plan
from dpjax.relevance import labels, record_noise, rigorous

_WEAKER = 2.5


class _Weak:
  """States what the honest mechanism states, and draws with 2.5 times its epsilon."""

  def __init__(self, kind, **settings):
    loud = {"epsilon", "epsilon_values"}
    broken = {k: v * _WEAKER if k in loud else v for k, v in settings.items()}
    if "noise_multiplier" in broken:
      broken["noise_multiplier"] /= _WEAKER
    self.honest, self.broken = kind(**settings), kind(**broken)

  def __call__(self, *arguments):
    return self.broken(*arguments)

  def __getattr__(self, name):
    return getattr(self.__dict__["honest"], name)


@dataclasses.dataclass(frozen=True)
class HalfNoise(Plan):
  """Charges for all of its noise and adds half of it."""

  def transform(self, key):
    fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(Plan)}
    fields["noise_multiplier"] = self.noise_multiplier / 2
    return Plan(**fields).transform(key)


def _half_noise(make):
  def broken(*arguments, **options):
    if "noise_multiplier" in options:
      options["noise_multiplier"] /= 2
    return make(*arguments, **options)

  return broken


def _half_central(plan, key):
  quiet = dataclasses.replace(plan, noise_multiplier=plan.noise_multiplier / 2)
  return federated.central(quiet, key)


def _leaky_mean(tx, **options):
  """The private mean, and with it a millionth of the raw one."""
  honest = federated.dp_mean(tx, **options)

  def update(messages, mask, state, weights=None):
    found, state = honest.update(messages, mask, state, weights)
    return found + 1e-4 * jnp.sum(jnp.where(mask[:, None], messages, 0), axis=0), state

  return federated.Aggregator(honest.init, update)


def _divided(scale):
  """Noise on records as if each scale were a third of what it is."""
  return lambda key, ids, x, scales, **options: record_noise.noisy_records(
    key, ids, x, np.asarray(scales) / scale, **options
  )


def _loud_labels(key, ids, given, *, epsilon, num_classes):
  return labels.noisy_labels(
    key, ids, given, epsilon=_WEAKER * epsilon, num_classes=num_classes
  )


def _loud_relevance(key, relevance, *, epsilon, **options):
  return rigorous.noisy_relevance(key, relevance, epsilon=4 * epsilon, **options)


def _mechanism(name):
  kind = getattr(mechanisms, name)
  return mechanism_games.GAMES[name](lambda **settings: _Weak(kind, **settings))


def _sampler(name):
  return sampler_games.games(getattr(sampling, name), HalfNoise)


def _transform(name):
  broken = _half_noise(getattr(transforms, name))
  return transform_games.games(name, broken, _half_noise(transforms.clip_and_noise))


def _federated(name):
  own = {
    "dp_mean": _leaky_mean,
    "central": _half_central,
    "client_noise": _half_noise(federated.client_noise),
  }
  found = own.get(name, getattr(federated, name))
  return federated_games.games(name, found, _half_central)


def _relevance(name):
  kind, _, which = name.partition(":")
  broken = {
    "features": _divided(3),
    "relevance": _loud_relevance,
    "labels": _loud_labels,
    "method": _divided(3) if which == "radp" else _quiet_plan,
  }[kind]
  return relevance_games.GAMES[name](broken)


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
class _RoundedUp(secure.SkellamSum):
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


def _secure(name):
  return secure_games.GAMES[name](sized_for_more_clients(16))


def _quiet_plan(plan):
  fields = {f.name: getattr(plan, f.name) for f in dataclasses.fields(Plan)}
  return HalfNoise(**fields)


GAMES = {
  "mechanisms": _mechanism,
  "samplers": _sampler,
  "transforms": _transform,
  "federated": _federated,
  "relevance": _relevance,
  "secure": _secure,
}
