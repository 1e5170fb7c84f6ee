"""Methods without a proof: RADP as in the paper, AdLM, ILM, and plain training. The first three
have a claimed epsilon, plain training has none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpjax import closed_over
from dpjax.relevance import adlm, feature_budget, feature_shares, paper, record_noise, train
from dpjax.relevance.inputs import FEATURES, LOSS, RELEVANCE, Inputs, RecordNoise
from dpjax.relevance.privacy import NOT_PRIVATE, Privacy


def no_dp(job: Inputs) -> train.Story:
  """Trains the second net on the raw records, without privacy."""
  net = job.nets.second
  records = (job.train.x, job.train.y)
  loss = train.cross_entropy(net.apply)
  return job.outcome(net, loss, lambda epoch: records, NOT_PRIVATE, len(job.train))


# --- RADP as in the paper


def radp_paper(job: Inputs) -> train.Story:
  """Runs RADP as in the paper, algorithms 1 to 3. Its epsilon is a claim, never proved."""
  share = yield from _share(job, job.paper.rel_norm)
  features = paper.features(
    job.keys.key(RELEVANCE),
    share,
    job.paper,
    epsilon=job.epsilon,
    num_records=len(job.for_relevance()),
    batch_size=job.training.batch_size,
  )
  net = job.nets.second
  privacy = _paper_privacy(job, features)
  records, corrupt = _paper_feed(job, features, job.paper)
  loss = train.cross_entropy(net.apply)
  n = len(job.train)
  outcome = yield from job.outcome(net, loss, records, privacy, n, corrupt=corrupt)
  noise = RecordNoise(
    job.shape,
    features.beta,
    features.scales,
    job.paper.mechanism,
    job.paper.shared_channels,
  )
  maps = {"not_private_relevance": share, "beta": features.beta}
  return outcome._replace(noise=noise, maps=maps)


def _share(job: Inputs, norm: str) -> train.Story:
  """Computes the mean relevance shares R [d] by model 1, trained on the raw records: NOT private.
  The memo of the job keeps them."""

  def make() -> train.Story:
    # Model 1 does not depend on the norm, so it is trained once for all norms.
    theta = yield from job.once(lambda: job.model_1(job.train), "model 1")
    apply = job.nets.first.apply
    source = job.for_relevance()
    return feature_shares.mean_shares(apply, theta, source, job.lrp, norm=norm)

  return job.once(make, "share", job.lrp, norm, job.relevance_records)


def _paper_feed(
  job: Inputs, features: paper.Features, how: Any
) -> tuple[Callable, Callable]:
  """Returns two functions: epoch -> records, and (x of a batch, step) -> x. `how.reading.draw`
  decides which of them adds the noise."""
  key = job.keys.key(FEATURES)
  draw = how.reading.draw
  mechanism = how.mechanism
  shared = how.shared_channels
  x = job.train.x
  y = job.train.y
  if draw in ("batch", "run"):
    scales = jnp.asarray(record_noise.by_feature(features.scales, job.shape))
    add = closed_over.jitted(
      lambda key, x: record_noise.noisy_batch(
        key, x, scales, mechanism=mechanism, shared_channels=shared
      )
    )
    at = (lambda step: step) if draw == "batch" else (lambda step: 0)
    return lambda epoch: (x, y), lambda x, step: add(jax.random.fold_in(key, at(step)), x)
  ids = np.arange(len(y))
  # The paper does not round noisy records to a grid.
  noisy = lambda key: record_noise.noisy_records(
    key, ids, x, features.scales, grid=None, mechanism=mechanism, shared_channels=shared
  )
  if draw == "record_once":
    once = noisy(key)
    return lambda epoch: (once, y), lambda x, step: x
  return lambda epoch: (noisy(jax.random.fold_in(key, epoch)), y), lambda x, step: x


def _paper_privacy(job: Inputs, features: paper.Features) -> Privacy:
  how = job.paper
  failed = paper.failed_assumptions(
    how,
    num_features=job.num_features,
    num_channels=job.channels,
    num_records=len(job.train),
  )
  return Privacy(
    kind="claimed",
    epsilon=job.epsilon,
    delta=0.0 if how.mechanism == "laplace" else how.delta,
    # Definition 1 of the paper has this relation.
    neighboring_relation="add_or_remove_one",
    failed_assumptions=tuple(failed),
    details={
      "departures": paper.departures(
        how, num_records=len(job.train), averaged=len(job.for_relevance())
      ),
      "preset": how.preset,
      "draw": how.reading.draw,
      "features_alone_local_epsilon": paper.local_epsilon(features, how, job.channels),
      "mean_noise_scale": float(np.mean(features.scales)),
    },
    claimed_epsilon=job.epsilon,
    claimed_epsilon_thm7=paper.claims(features, job.epsilon)["claimed_epsilon_thm7"],
  )


# --- AdLM and ILM


def adlm_method(job: Inputs, *, with_relevance: bool = True) -> train.Story:
  """Runs AdLM, or ILM if `with_relevance` is False. A batch shares one noise map, and the loss is
  noisy unless `job.adlm.loss_noise` is False. The epsilon is only a claim."""
  # The budget is divided equally among relevance (AdLM only), inputs and loss.
  thirds = 3 if with_relevance else 2
  share = job.epsilon / thirds
  beta = feature_budget.uniform(job.num_features)
  maps = {}
  if with_relevance:
    beta, maps = yield from _adlm_beta(job, share)
  scales = adlm.input_scales(
    beta, job.adlm, epsilon=share, batch_size=job.training.batch_size
  )
  privacy = Privacy(
    kind="claimed",
    epsilon=job.epsilon,
    delta=0.0,
    neighboring_relation="add_or_remove_one",
    claimed_epsilon=job.epsilon,
    failed_assumptions=adlm.FAILED + (() if job.adlm.loss_noise else adlm.NO_LOSS_NOISE),
    details={"mean_noise_scale": float(np.mean(scales)), "draw": "batch"},
  )
  limit = job.adlm.input_clip
  noise = RecordNoise(job.shape, beta, scales, "laplace", True, clip_after=limit)
  shaped = jnp.asarray(record_noise.by_feature(scales, job.shape))
  key = job.keys.key(FEATURES)

  # The key is an argument of the program, which may be kept on disk.
  @closed_over.jitted
  def corrupt(x, step):
    mine = jax.random.fold_in(key, step)
    return jnp.clip(
      record_noise.noisy_batch(mine, x, shaped, shared_channels=True), -limit, limit
    )

  coefficients = adlm.loss_noise(
    job.keys.key(LOSS),
    job.adlm,
    num_classes=job.train.num_classes,
    epsilon=share,
    batch_size=job.training.batch_size,
  )
  net = adlm.net(job.nets.body, job.train.num_classes)
  loss = adlm.polynomial_loss(net, coefficients)
  records = (job.train.x, job.train.y)
  more: dict[str, Any] = {"corrupt": corrupt, "refresh": net.refresh}
  n = len(job.train)
  outcome = yield from job.outcome(net, loss, lambda epoch: records, privacy, n, **more)
  return outcome._replace(noise=noise, maps=maps)


def _adlm_beta(job: Inputs, epsilon: float) -> train.Story:
  share = yield from _share(job, "abs")
  spread = share - share.min()
  # Shares are scaled to [0, 1] by their range in the data, which no noise protects.
  scaled = spread / max(spread.max(), 1e-30)
  d = len(share)
  n = len(job.for_relevance())
  drawn = record_noise.sample(
    job.keys.key(RELEVANCE), jnp.full(d, 2 * d / (n * epsilon), jnp.float32), (d,)
  )
  beta = feature_budget.floor_normalized(scaled + np.asarray(drawn, np.float64), 0.1)
  return beta, {"not_private_relevance": share, "beta": beta}
