"""All methods of the paper's tests, and ours, through one door: a Job in, an Outcome out.

| method          | mode of proof                                                            |
| --------------- | ------------------------------------------------------------------------ |
| radp            | paper: claimed; rigorous: proved under replace_one                       |
| radp_dpsgd      | proved: DP relevance weights the inputs, then DP-SGD; composed           |
| adlm, ilm       | claimed only                                                             |
| dpsgd           | proved: clipped, noisy gradients behind SGD (Abadi et al. 2016)          |
| tempered        | proved: the same with tempered sigmoids (Papernot et al. 2021)           |
| dp_adam         | proved: the same gradients behind Adam                                   |
| dpdligdo        | proved (PIAdam, PIAdaGrad, PIRMSProp); claimed with legacy_microbatch=2  |
| dp_sgld         | proved: the same noise as Langevin dynamics (Wang et al. 2015)           |
| no_dp           | none                                                                     |
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpjax import accounting, validate
from dpjax.relevance import (
  adlm,
  budget,
  gradients,
  labels,
  noise,
  paper,
  privacy,
  relevance,
  rigorous,
  train,
)
from dpjax.relevance.job import (
  FEATURES,
  LABELS,
  LOSS,
  RELEVANCE,
  Job,
  Noise,
  Outcome,
  Streams,
)
from dpjax.relevance.privacy import NOT_PRIVATE, Privacy
from dpjax.relevance.rigorous import StageCharge
from dpjax.relevance.settings import MODES, Rigorous
from dpjax.validate import UserError

_PIXEL_VARIANCE = 0.1  # a public guess, to weigh signal against noise; any number is safe
_FLOAT_NOTE = (
  "Laplace and Gaussian samples are float32 with tails to 133 scales and 9.49 std, rounded "
  "with the record to multiples of 1/64; the proof is for real-valued noise"
)


def no_dp(job: Job) -> Outcome:
  """Plain training."""
  model = job.nets.second
  initial = _init(job, model, job.train.x, 2)
  params = _plain(job, model, initial, job.train, train.SECOND, job.scored(model.apply))
  steps = _num_steps(job, len(job.train))
  return Outcome(model.apply, initial, params, NOT_PRIVATE, steps, job.test)


def _init(job: Job, model: Any, x: Any, index: int) -> Any:
  return model.init(jax.random.fold_in(job.streams.init, index), jnp.asarray(x[:1]))


def _plain(
  job: Job, model: Any, params: Any, data: Any, name: str, scored: Any = None
) -> Any:
  return train.fit(
    train.cross_entropy(model.apply),
    params,
    lambda epoch: (data.x, data.y),
    job.training,
    num_records=len(data.y),
    seed=job.streams.order,
    name=name,
    scored=scored,
    trainer=job.carry_out,
  )


def _num_steps(job: Job, num_records: int) -> int:
  per_epoch = num_records // min(job.training.batch_size, num_records)
  return per_epoch * job.training.num_epochs


# --- RADP as the paper has it


def radp_paper(job: Job) -> Outcome:
  """Algorithms 1 to 3. The result is claimed, never proved."""
  share = _share(job, job.paper.rel_norm)
  found = paper.features(
    job.streams.key(RELEVANCE),
    share,
    job.paper,
    epsilon=job.epsilon,
    num_records=len(job.for_relevance()),
    batch_size=job.training.batch_size,
  )
  initial = _init(job, job.nets.second, job.train.x, 2)
  params = _paper_model_2(job, found, initial)
  maps = {"not_private_relevance": share, "beta": found.beta}
  made = Noise(
    job.shape, found.beta, found.scales, job.paper.mechanism, job.paper.shared_channels
  )
  return Outcome(
    job.nets.second.apply,
    initial,
    params,
    _paper_privacy(job, found),
    _num_steps(job, len(job.train)),
    job.test,
    noise=made,
    maps=maps,
  )


def _share(job: Job, norm: str) -> np.ndarray:
  """R [d] by model 1, trained on the raw records: NOT private. Computed once per memo."""

  def make() -> np.ndarray:
    model = job.nets.first
    fitted = lambda: _plain(
      job, model, _init(job, model, job.train.x, 1), job.train, train.FIRST
    )
    theta = job.once(fitted, "model 1")
    source = job.for_relevance()
    return relevance.mean_shares(model.apply, theta, source, job.lrp, norm=norm)

  return job.once(make, "share", job.lrp, norm, job.relevance_records)


def _paper_model_2(job: Job, found: paper.Features, initial: Any) -> Any:
  how, model = job.paper, job.nets.second
  records, corrupt = _paper_feed(job, found, how)
  return train.fit(
    train.cross_entropy(model.apply),
    initial,
    records,
    job.training,
    num_records=len(job.train),
    seed=job.streams.order,
    name=train.SECOND,
    scored=job.scored(model.apply),
    trainer=job.carry_out,
    corrupt=corrupt,
  )


def _paper_feed(job: Job, found: paper.Features, how: Any) -> tuple[Callable, Callable]:
  """(records of an epoch, change of a batch) for each way to draw."""
  key, draw = job.streams.key(FEATURES), how.reading.draw
  options: dict[str, Any] = dict(
    mechanism=how.mechanism, shared_channels=how.shared_channels
  )
  x, y = job.train.x, job.train.y
  if draw in ("batch", "run"):
    scales = jnp.asarray(noise.by_feature(found.scales, job.shape))
    add = jax.jit(lambda key, x: noise.noisy_batch(key, x, scales, **options))
    at = (lambda step: step) if draw == "batch" else (lambda step: 0)
    return lambda epoch: (x, y), lambda x, step: add(jax.random.fold_in(key, at(step)), x)
  ids = np.arange(len(y))
  noisy = lambda key: noise.noisy_records(key, ids, x, found.scales, grid=None, **options)
  if draw == "record_once":
    once = noisy(key)
    return lambda epoch: (once, y), lambda x, step: x
  return lambda epoch: (noisy(jax.random.fold_in(key, epoch)), y), lambda x, step: x


def _paper_privacy(job: Job, found: paper.Features) -> Privacy:
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
    neighboring_relation="add_or_remove_one",  # definition 1 of the paper
    failed_assumptions=tuple(failed),
    details={
      "preset": how.preset,
      "draw": how.reading.draw,
      "features_alone_local_epsilon": paper.local_epsilon(found, how, job.channels),
      "mean_noise_scale": float(np.mean(found.scales)),
    },
    claimed_epsilon=job.epsilon,
    claimed_epsilon_thm7=paper.claims(found, job.epsilon)["claimed_epsilon_thm7"],
  )


# --- RADP with a proof


class _Prepared(NamedTuple):
  """Records of D2 after stages A to L, and how test inputs are treated alike."""

  records: Callable[[int], tuple[np.ndarray, np.ndarray]]  # of an epoch
  num_records: int
  class_priors: np.ndarray
  test: Any
  prepare: Callable[[np.ndarray], np.ndarray]
  noise: Noise
  charges: list[StageCharge]
  details: dict[str, Any]


def radp_rigorous(job: Job) -> Outcome:
  """Stages A, B, C, L and S of `rigorous`; then any training is post-processing.

  The noise is bound to the settings and to the records: a second run with the same streams
  and another epsilon, or other records, shares no noise with the first.
  """
  rigorous.check_domain(**{"train.x": job.train.x, "test.x": job.test.x})
  told, job = job, dataclasses.replace(job, streams=_bound(job, job.rigorous))
  uses_relevance = job.rigorous.model1 != "none"
  ids_1, ids_2 = _ids(job)
  beta, charges = (
    _stages_a_b(_of_stages_a_b(told), ids_1) if uses_relevance else (_uniform(job), [])
  )
  left = _left_for_records(job, charges)
  prepared = _stages_c_l_s(job, beta, ids_2, left)
  model = job.nets.second
  initial = _init(job, model, prepared.test.x, 2)
  params = _model_2(job, model, initial, prepared)
  charges = [*charges, *prepared.charges]
  epsilon, delta = rigorous.total(charges)
  notes = [_FLOAT_NOTE, *_rigorous_notes(job)]
  public = job.rigorous.labels == "public"
  found = privacy.proved(
    epsilon,
    delta,
    rigorous.FEATURES_ONLY if public else rigorous.RELATION,
    unit=rigorous.FEATURES_UNIT if public else "example",
    ledger=charges,
    notes=notes,
    **prepared.details,
  )
  return Outcome(
    model.apply,
    initial,
    params,
    found,
    _num_steps(job, len(ids_2)),
    prepared.test,
    prepared.prepare,
    prepared.noise,
    {"beta": beta},
  )


def _ids(job: Job) -> tuple[np.ndarray, np.ndarray]:
  """The records of D1 and of D2: all of them twice, unless they are split."""
  how, n = job.rigorous, len(job.train)
  if how.model1 == "none" or not how.split:
    parts = np.arange(n), np.arange(n)
  else:
    parts = rigorous.split_by_hash(n, how.split_share)
  if not all(map(len, parts)):
    raise UserError(
      f"train: its {n} records leave {len(parts[0])} for the relevance and {len(parts[1])} "
      "for the features; both must be >= 1"
    )
  return parts


def _of_stages_a_b(job: Job) -> Job:
  """The job whose noise is bound to what decides stages A and B alone: settings of the later
  stages leave their release as it is."""
  later = ("features", "clip", "labels", "label_share", "draw", "compose_fresh")
  default = {name: getattr(Rigorous(), name) for name in (*later, "beta_power", "floor")}
  how = dataclasses.replace(job.rigorous, **default)
  return dataclasses.replace(job, streams=_bound(job, how))


def _bound(job: Job, how: Rigorous) -> Streams:
  """The streams, their noise a function of the settings and of the records as well.

  With one noise at two scales the records could be solved for, and with one noise on two
  data sets their difference is free of it. Under a secret key the noise of every (settings,
  records) is a draw of its own.
  """
  told = (job.epsilon, how, job.training, job.lrp, job.private, job.nets)
  told += (job.train.num_classes, job.streams.order)
  digest = hashlib.sha256(repr(told).encode())
  public = [] if job.public is None else [job.public.x, job.public.y]
  init = np.asarray(jax.random.key_data(job.streams.init))
  for array in (job.train.x, job.train.y, init, *public):
    digest.update(repr(array.shape).encode())
    digest.update(np.ascontiguousarray(array).tobytes())
  key, words = job.streams.noise, np.frombuffer(digest.digest()[:16], np.uint32)
  for word in words:
    key = jax.random.fold_in(key, word)
  secret = [job.streams.secret, int.from_bytes(digest.digest()[16:], "big")]
  mixed = np.random.SeedSequence(secret).generate_state(8, np.uint32)
  return job.streams._replace(noise=key, secret=int.from_bytes(mixed.tobytes(), "big"))


def _pool(job: Job) -> int:
  return job.rigorous.pool if len(job.shape) == 3 else 1


def _pooled_shape(job: Job) -> tuple[int, ...]:
  return rigorous.pooled(job.train.x[:1], _pool(job)).shape[1:]


def _uniform(job: Job) -> np.ndarray:
  return budget.uniform(relevance.num_features(_pooled_shape(job)))


def _stages_a_b(job: Job, ids: np.ndarray) -> tuple[np.ndarray, list[StageCharge]]:
  """beta from the records of D1, and what that costs them."""
  how = job.rigorous
  where = "D1" if how.split else "all"
  data = job.train.subset(ids)
  shared = how.model1 == "dp_sgd" and not how.split
  cap = job.epsilon * how.budget_share_1 if shared else job.epsilon
  more = how.model1 == "dp_sgd" or not how.split  # is paid by the same records
  if how.epsilon_b > cap or (how.epsilon_b >= cap and more):
    raise UserError(
      f"rigorous.epsilon_b={how.epsilon_b!r}: must leave room in the {cap:g} that model 1 "
      "and the relevance may cost"
    )
  theta_1, charges = _model_1(job, data, cap - how.epsilon_b, where)
  share = relevance.mean_shares(
    job.nets.first.apply, theta_1, data, job.lrp, norm=how.rel_norm
  )
  noisy = rigorous.noisy_relevance(
    job.streams.key(RELEVANCE),
    rigorous.pooled_shares(share, job.shape, _pool(job)),
    num_records=len(data),
    epsilon=how.epsilon_b,
    delta=how.delta / 4 if how.rel_noise == "gaussian" else 0.0,
  )
  floor = budget.default_floor(len(noisy)) if how.floor is None else how.floor
  delta_b = how.delta / 4 if how.rel_noise == "gaussian" else 0.0
  what = f"mean relevance of {len(data)} records with {how.rel_noise} noise"
  charges.append(StageCharge("B", where, how.epsilon_b, delta_b, what))
  return budget.floor_normalized(noisy, floor, how.beta_power), charges


def _model_1(
  job: Job, data: Any, epsilon: float, where: str
) -> tuple[Any, list[StageCharge]]:
  """Parameters of model 1: untrained, from public data, or by DP-SGD on D1."""
  how, model = job.rigorous, job.nets.first
  if how.model1 == "untrained":
    what = "initial parameters: independent of the data"
    return _init(job, model, data.x, 1), [StageCharge("A", where, 0.0, 0.0, what)]
  if how.model1 == "public":
    if job.public is None:
      raise UserError("rigorous.model1='public': needs public data of the same shape")
    _check_public(job)
    what = f"trained on public data ({job.public.name})"
    theta = _plain(job, model, _init(job, model, job.public.x, 1), job.public, train.FIRST)
    return theta, [StageCharge("A", where, 0.0, 0.0, what)]
  plan = gradients.replace_one_plan(job, len(data), epsilon, how.delta / 2)
  theta = gradients.train_model_1(job, model, data, plan)
  spent = plan.epsilon()
  return theta, [StageCharge("A", where, spent, plan.delta, "model 1 by DP-SGD")]


def _check_public(job: Job) -> None:
  """Raises where what is called public holds private records: that would go uncharged."""
  private = {row.tobytes() for row in np.asarray(job.train.x)}
  shared = sum(row.tobytes() in private for row in np.asarray(job.public.x))
  if shared:
    raise UserError(
      f"public={job.public.name!r}: {shared} of its records are in the training data "
      f"{job.train.name!r}, which are private; use other data, or rigorous.model1='dp_sgd'"
    )


def _left_for_records(job: Job, charges: list[StageCharge]) -> float:
  if job.rigorous.split or not charges:
    return job.epsilon
  return job.epsilon - math.fsum(charge.epsilon for charge in charges)


def _local_budget(job: Job, epsilon: float, num_records: int) -> float:
  """What a record may spend locally."""
  if not job.rigorous.shuffle:
    return epsilon
  return rigorous.local_epsilon_for(epsilon, num_records, _delta_s(job))


def _delta_s(job: Job) -> float:
  """Of the records' stages; unsplit, what stages A and B leave of delta."""
  how = job.rigorous
  return how.delta if how.split or how.model1 == "none" else how.delta / 4


def _stages_c_l_s(job: Job, beta: np.ndarray, ids: np.ndarray, epsilon: float) -> _Prepared:
  how = job.rigorous
  local = _local_budget(job, epsilon, len(ids))
  epsilon_l = local * how.label_share if how.labels == "randomized_response" else 0.0
  copies = job.training.num_epochs if how.draw == "record_fresh" else 1
  drawn = rigorous.feature_noise(
    beta,
    _per_copy(job, copies),
    epsilon=(local - epsilon_l) / copies,
    channels=job.channels,
  )
  reduce = lambda x: rigorous.clipped(rigorous.pooled(x, _pool(job)), beta, how)
  noisy = _noisy_features(job, ids, reduce(job.train.x[ids]), drawn)
  scale = _scale(job, drawn, noisy(0))
  responses, class_priors = _responses(job, ids, epsilon_l)
  prepare = lambda x: scale(reduce(x))
  return _Prepared(
    _shuffled(job, lambda copy: scale(noisy(copy)), responses, copies),
    len(ids),
    class_priors,
    dataclasses.replace(job.test, x=prepare(job.test.x)),
    prepare,
    _noise_of(job, beta, drawn),
    _record_charges(job, drawn, epsilon_l, copies, epsilon),
    {
      "epsilon_labels": epsilon_l,
      "epsilon_local": local,
      "labels_public": how.labels == "public",
      "draw": how.draw,
      "mean_noise_scale": float(np.mean(drawn.scales)),
    },
  )


def _noise_of(job: Job, beta: np.ndarray, drawn: Any) -> Noise:
  clip = job.rigorous.clip if job.rigorous.features == "laplace_clipped" else None
  shape = _pooled_shape(job)
  return Noise(shape, beta, drawn.scales, drawn.mechanism, grid=noise.GRID, l1_clip=clip)


def _per_copy(job: Job, copies: int) -> Any:
  """The settings with the delta that one copy of the features may spend."""
  return dataclasses.replace(job.rigorous, delta=_delta_s(job) / copies)


def _scale(job: Job, drawn: Any, noisy: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
  """Centres by the mean of the NOISY records (post-processing) and scales by the public
  noise, so that every input of model 2 has about unit variance."""
  per = math.sqrt(2) if drawn.mechanism == "laplace" else 1.0
  std = np.sqrt(_PIXEL_VARIANCE + (per * drawn.scales) ** 2)
  shaped = noise.by_feature(std, _pooled_shape(job))
  mean = noisy.mean(axis=0)
  return lambda x: np.asarray((x - mean[None]) / shaped[None], np.float32)


def _noisy_features(
  job: Job, ids: np.ndarray, x: np.ndarray, drawn: Any
) -> Callable[[int], np.ndarray]:
  """copy -> the records' features with the noise of that copy."""
  key = job.streams.key(FEATURES)
  return lambda copy: noise.noisy_records(
    jax.random.fold_in(key, copy), ids, x, drawn.scales, mechanism=drawn.mechanism
  )


def _responses(
  job: Job, ids: np.ndarray, epsilon_l: float
) -> tuple[np.ndarray, np.ndarray]:
  """(labels after randomised response, class shares estimated from them alone)."""
  y, k = job.train.y[ids], job.train.num_classes
  if not epsilon_l:  # public labels
    counts = np.bincount(y, minlength=k) + 1.0
    return y, counts / counts.sum()
  key = job.streams.key(LABELS)
  y = labels.noisy_labels(key, ids, y, epsilon=epsilon_l, num_classes=k)
  return y, labels.priors(y, epsilon_l, k)


def _shuffled(
  job: Job, features: Callable[[int], np.ndarray], y: np.ndarray, copies: int
) -> Callable[[int], tuple[np.ndarray, np.ndarray]]:
  """epoch -> (x, y) in a secret order, which drops the records' ids."""
  order = np.arange(len(y))
  if job.rigorous.shuffle:
    order = np.random.default_rng([job.streams.secret, 1]).permutation(len(y))
  if copies > 1:
    return lambda epoch: (features(epoch)[order], y[order])
  once = features(0)[order], y[order]
  return lambda epoch: once


def _record_charges(
  job: Job, drawn: Any, epsilon_l: float, copies: int, epsilon: float
) -> list[StageCharge]:
  """`epsilon` is the central one that `_local_budget` turned into a local budget."""
  how = job.rigorous
  where = "D2" if how.split and how.model1 != "none" else "all"
  spent, delta = drawn.epsilon * copies, drawn.delta * copies
  fresh = f", {copies} fresh copies" if copies > 1 else ""
  if how.shuffle:
    what = f"shuffled reports of local epsilon {accounting.upper(spent + epsilon_l)}{fresh}"
    return [StageCharge("C+L+S", where, epsilon, _delta_s(job), what)]
  charges = [StageCharge("C", where, spent, delta, f"features, {how.features}{fresh}")]
  if epsilon_l:
    charges.append(StageCharge("L", where, epsilon_l, 0.0, "randomised response"))
  return charges


def _model_2(job: Job, model: Any, initial: Any, prepared: _Prepared) -> Any:
  epsilon_l = prepared.details["epsilon_labels"]
  k = job.train.num_classes
  transitions = labels.transition(epsilon_l, k) if epsilon_l else np.eye(k)
  loss = train.corrected(model.apply, transitions, prepared.class_priors)
  return train.fit(
    loss,
    initial,
    prepared.records,
    job.training,
    num_records=prepared.num_records,
    seed=job.streams.order,
    name=train.SECOND,
    scored=job.scored(model.apply, prepared.test),
    trainer=job.carry_out,
    weight_decay=job.training.weight_decay,
    anneal=True,  # the noise of the last steps would drown what little signal there is
  )


def _rigorous_notes(job: Job) -> list[str]:
  how, notes = job.rigorous, []
  if how.labels == "public":
    notes.append("adjacency WITHOUT labels: they count as public and are used raw")
  if how.shuffle:
    notes.append("needs a trusted shuffler: central model")
  if how.seeded_noise:
    notes.append("noise comes from the seed: reproducible, NOT fit for a release")
  return notes


# --- AdLM and ILM


def adlm_method(job: Job, *, with_relevance: bool = True) -> Outcome:
  """Relevance, one noise map per batch, a noisy polynomial loss. Claimed only."""
  thirds = 3 if with_relevance else 2
  share = job.epsilon / thirds
  beta, maps = _uniform_places(job), {}
  if with_relevance:
    beta, maps = _adlm_beta(job, share)
  scales = adlm.input_scales(
    beta, job.adlm, epsilon=share, batch_size=job.training.batch_size
  )
  net = adlm.net(job.nets.body, job.train.num_classes)
  initial = net.init(jax.random.fold_in(job.streams.init, 2), jnp.asarray(job.train.x[:1]))
  params = _fit_adlm(job, net, initial, scales, share)
  found = Privacy(
    kind="claimed",
    epsilon=job.epsilon,
    delta=0.0,
    neighboring_relation="add_or_remove_one",
    claimed_epsilon=job.epsilon,
    failed_assumptions=adlm.FAILED,
    details={"mean_noise_scale": float(np.mean(scales)), "draw": "batch"},
  )
  steps = _num_steps(job, len(job.train))
  clip = job.adlm.input_clip
  made = Noise(job.shape, beta, scales, "laplace", True, clip_after=clip)
  return Outcome(net.apply, initial, params, found, steps, job.test, noise=made, maps=maps)


def _uniform_places(job: Job) -> np.ndarray:
  return budget.uniform(job.num_features)


def _adlm_beta(job: Job, epsilon: float) -> tuple[np.ndarray, dict[str, np.ndarray]]:
  share = _share(job, "abs")
  spread = share - share.min()
  scaled = spread / max(spread.max(), 1e-30)  # to [0, 1] by the data's own range
  d, n = len(share), len(job.for_relevance())
  drawn = noise.sample(
    job.streams.key(RELEVANCE), jnp.full(d, 2 * d / (n * epsilon), jnp.float32), (d,)
  )
  beta = budget.floor_normalized(scaled + np.asarray(drawn, np.float64), 0.1)
  return beta, {"not_private_relevance": share, "beta": beta}


def _fit_adlm(
  job: Job, net: adlm.Net, initial: Any, scales: np.ndarray, epsilon: float
) -> Any:
  shaped = jnp.asarray(noise.by_feature(scales, job.shape))
  key, limit = job.streams.key(FEATURES), job.adlm.input_clip

  @jax.jit
  def corrupt(x, step):
    mine = jax.random.fold_in(key, step)
    return jnp.clip(noise.noisy_batch(mine, x, shaped, shared_channels=True), -limit, limit)

  coefficients = adlm.loss_noise(
    job.streams.key(LOSS),
    job.adlm,
    num_classes=job.train.num_classes,
    epsilon=epsilon,
    batch_size=job.training.batch_size,
  )
  x, y = job.train.x, job.train.y
  return train.fit(
    adlm.polynomial_loss(net, coefficients),
    initial,
    lambda epoch: (x, y),
    job.training,
    num_records=len(job.train),
    seed=job.streams.order,
    name=train.SECOND,
    scored=job.scored(net.apply),
    trainer=job.carry_out,
    corrupt=corrupt,
    refresh=net.refresh,
  )


METHODS: dict[str, Callable[[Job], Outcome]] = {
  "radp_dpsgd": gradients.radp_dpsgd,
  "adlm": adlm_method,
  "ilm": lambda job: adlm_method(job, with_relevance=False),
  "dpsgd": gradients.dpsgd,
  "tempered": gradients.tempered,
  "dp_adam": gradients.dp_adam,
  "dpdligdo": gradients.dpdligdo,
  "dp_sgld": gradients.dp_sgld,
  "no_dp": no_dp,
}
NAMES = ("radp", *METHODS)


def reads(method: str, mode: str, how: Rigorous) -> frozenset[str]:
  """Which of the optional parts of a Job a method reads; `run` refuses the others.

  >>> sorted(reads("radp", "paper", Rigorous())), sorted(reads("dpsgd", "paper", Rigorous()))
  (['relevance_records'], [])
  """
  averages = method == "adlm" or (method, mode) == ("radp", "paper")
  public = (method, mode) == ("radp", "rigorous") and how.model1 == "public"
  names = {"relevance_records": averages, "public": public}
  return frozenset(name for name, is_read in names.items() if is_read)


def _refuse_unread(method: str, mode: str, job: Job) -> None:
  """Raises for parts of the job that the method would leave unread, or cannot take."""
  read = reads(method, mode, job.rigorous)
  validate.integer_at_least(1, public_size=job.size)
  if job.relevance_records is not None:
    validate.integer_at_least(1, relevance_records=job.relevance_records)
    if "relevance_records" not in read:
      raise UserError(
        f"relevance_records={job.relevance_records!r}: must be None for method={method!r} "
        f"in mode={mode!r}: only 'adlm', and 'radp' in mode='paper', average over fewer "
        "records than the training data hold"
      )
  if job.public is not None and "public" not in read:
    raise UserError(
      f"public={job.public.name!r}: must be None unless method='radp' in mode='rigorous' "
      "with rigorous.model1='public': nothing else reads it"
    )
  present = getattr(job.train, "present", None)
  if present is not None and not np.all(present):
    raise UserError(
      f"train: {np.count_nonzero(~np.asarray(present))} of its records are empty "
      "(present=False); every record is averaged over, noised and counted here: leave them "
      "out"
    )


def run(method: str, mode: str, job: Job) -> Outcome:
  """Runs one method; `mode` decides for "radp" alone.

  Raises:
    UserError: an unknown method or mode, or what rigorous mode refuses, by name.
  """
  validate.one_of(NAMES, method=method)
  validate.one_of(MODES, mode=mode)
  validate.positive(epsilon=job.epsilon)
  _refuse_unread(method, mode, job)
  decay = job.training.weight_decay
  if decay and (method, mode) != ("radp", "rigorous"):
    raise UserError(
      f"weight_decay={decay!r}: must be 0 for method={method!r} in mode={mode!r}: only "
      "method='radp' in mode='rigorous' trains with it"
    )
  if method == "radp":
    return radp_paper(job) if mode == "paper" else radp_rigorous(job)
  return METHODS[method](job)
