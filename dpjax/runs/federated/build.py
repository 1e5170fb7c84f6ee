"""From a `FedConfig` to the objects of a federated run. No training happens here."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from dp_accounting import DpEvent

from dpjax import accounting, federated, models, names, sampling, transforms, validate
from dpjax import data as data_lib
from dpjax.data import Federation, partition, shakespeare
from dpjax.runs import bounds
from dpjax.runs.central import build
from dpjax.runs.central import ftrl
from dpjax.runs import unused
from dpjax.runs import user_code
from dpjax.runs import streams as streams_lib
from dpjax.runs.central.config import OptimizerConfig, PrivacyConfig, TrainConfig
from dpjax.runs.federated.config import FedConfig
from dpjax.federated import execution, placement, processes
from dpjax.federated.server_optimizers import fed_opt
from dpjax.plan import Plan
from dpjax.types import NeighboringRelation
from dpjax.validate import UserError

METHODS = ("central", "local", "both", "none", "dp_ftrl")
SAMPLERS = ("poisson", "fixed_size")
PARTITIONS = (
  "iid",
  "dirichlet",
  "dirichlet_hsu",
  "shards",
  "quantity_skew",
  "power_law",
  "shakespeare",
)
ALGORITHMS = ("fed_avg", "fed_sgd", "fed_prox", "fed_nova", "scaffold", "mime_lite")
AGGREGATORS = ("mean", "median", "trimmed_mean", "krum", "geometric_median")
WEIGHTINGS = ("uniform", "examples", "capped")
COMPRESSIONS = ("none", "quantize", "top_k", "rotated", "drive")
CLIPPINGS = ("flat", "adaptive")
_CENTRAL = ("central", "both", "dp_ftrl")
_OPTIMIZERS: dict[str, Callable[[Any, OptimizerConfig], Any]] = {
  "sgd": lambda rate, c: optax.sgd(rate, momentum=c.momentum or None),
  "adam": lambda rate, c: optax.adam(rate, b1=0.9, b2=0.99, eps=1e-3),
  "yogi": lambda rate, c: optax.yogi(rate, b1=0.9, b2=0.99, eps=1e-3),
  "adagrad": lambda rate, c: optax.adagrad(rate, 0.0, eps=1e-3),
}
_OF_SGD = ("fed_nova", "scaffold")  # derived for clients that take steps of plain SGD


class Streams(NamedTuple):
  """Every source of randomness of a federated run."""

  init: jax.Array  # depends on the seed alone
  noise: jax.Array  # the server's
  client: jax.Array  # on clients: rounding, dropout, local noise
  sampler: int  # 128 bits


class Promise(NamedTuple):
  """What is reported: whose epsilon, under which assumptions."""

  kind: str  # proved | simulated | none
  delta: float
  relation: str
  step_event: Callable[[int], DpEvent]  # what a round of THIS run is charged
  remaining_event: Callable[[int], DpEvent]  # ... and its rounds from this one to the last
  curve: Callable[[Sequence[int]], np.ndarray]  # epsilon after so many rounds
  statement: Callable[[int], str]  # in words, after so many rounds


class FedRun(NamedTuple):
  """What a federated loop needs."""

  plan: Plan  # of what runs: sampler and server noise
  promise: Promise
  algorithm: federated.FederatedAlgorithm
  params: Any
  apply: Any
  random: Streams
  federation: Federation
  work: federated.LocalWork
  test: Any
  task: build.Task


def check(config: FedConfig) -> None:
  """Raises UserError for what can be told without data."""
  bounds.typed(config)
  one_of = {
    "partition.name": (PARTITIONS, config.partition.name),
    "algorithm.weighting": (WEIGHTINGS, config.algorithm.weighting),
    "algorithm.compression": (COMPRESSIONS, config.algorithm.compression),
    "privacy.method": (METHODS, config.privacy.method),
    "privacy.clipping": (CLIPPINGS, config.privacy.clipping),
    "execution": (execution.NAMES, config.execution),
  }
  for name, (choices, value) in one_of.items():
    validate.one_of(choices, **{name: value})
  or_path = {
    "algorithm.name": (ALGORITHMS, config.algorithm.name),
    "algorithm.aggregator": (AGGREGATORS, config.algorithm.aggregator),
    "privacy.sampler": (SAMPLERS, config.privacy.sampler),
    "client_optimizer.name": (_OPTIMIZERS, config.client_optimizer.name),
    "server_optimizer.name": (_OPTIMIZERS, config.server_optimizer.name),
  }
  for name, (choices, value) in or_path.items():
    names.one_of(choices, **{name: value})
  bounds.federation(config)
  if config.partition.name == "shakespeare":
    _check_natural(config)
  else:
    _check_cohort(config, config.partition.num_clients)
  _check_stop(config)
  _check_release(config)
  _check_combination(config)
  _check_promise(config)
  unused.refuse(config, unused.of_federation(config))


def _check_cohort(config: FedConfig, num_clients: int) -> None:
  if config.clients_per_round > num_clients:
    raise UserError(
      f"clients_per_round={config.clients_per_round}: must be <= partition.num_clients="
      f"{num_clients}"
    )


def _check_natural(config: FedConfig) -> None:
  """Clients that the data decide: nothing of the data is dealt or cut."""
  wanted = {"data.name": "shakespeare", "data.limit": None, "data.center": False}
  wanted["data.num_classes"] = None  # declared by the task
  wanted["model.name"] = "transformer"  # the language model here
  rooms = {"data": config.data, "model": config.model}
  for path, value in wanted.items():
    room, _, name = path.partition(".")
    if getattr(rooms[room], name) != value:
      raise UserError(
        f"{path}={getattr(rooms[room], name)!r}: must be {value!r} for "
        "partition.name='shakespeare'"
      )


def _check_stop(config: FedConfig) -> None:
  """A stopping time that depends on the run has no epsilon of its own here."""
  target = config.stop_at_accuracy
  if target is None:
    return
  validate.probability(stop_at_accuracy=target)
  if config.privacy.method != "none":
    raise UserError(
      f"stop_at_accuracy={target}: needs privacy.method='none'; a private run pays for its "
      "num_rounds, which must not depend on what it sees"
    )


def _check_release(config: FedConfig) -> None:
  privacy = config.privacy
  if not config.release:
    return
  if privacy.method not in ("central", "dp_ftrl") or privacy.simulated_cohort is not None:
    raise UserError(
      "release=True: needs privacy.method='central' or 'dp_ftrl' and no "
      f"privacy.simulated_cohort, not {privacy.method!r} and {privacy.simulated_cohort!r}; "
      "only what the server's noise covers may be released"
    )


def _check_combination(config: FedConfig) -> None:
  algorithm, central = config.algorithm, config.privacy.method in _CENTRAL
  if central and algorithm.aggregator != "mean":
    raise UserError(
      f"algorithm.aggregator={algorithm.aggregator!r}: must be 'mean' with privacy.method="
      f"{config.privacy.method!r}: no epsilon is proved for it"
    )
  if config.privacy.method != "none" and algorithm.weighting == "examples":
    raise UserError(
      "algorithm.weighting='examples': a client's weight has no bound; use 'uniform' or "
      "'capped' with privacy"
    )
  _check_client_optimizer(config)
  wraps = algorithm.compression != "none" or config.privacy.method in ("local", "both")
  if wraps and algorithm.name not in ("fed_avg", "fed_prox"):
    raise UserError(
      f"algorithm.name={algorithm.name!r}: must be 'fed_avg' or 'fed_prox' with compression "
      "or noise on the client"
    )


def _check_client_optimizer(config: FedConfig) -> None:
  """The control variates of SCAFFOLD and the step counts of FedNova are those of SGD."""
  name, optimizer = config.algorithm.name, config.client_optimizer
  if name in _OF_SGD and optimizer.name != "sgd":
    raise UserError(
      f"client_optimizer.name={optimizer.name!r}: must be 'sgd' for algorithm.name={name!r}, "
      "whose derivation counts plain gradient steps"
    )
  if name == "scaffold" and optimizer.momentum != 0:
    raise UserError(
      f"client_optimizer.momentum={optimizer.momentum!r}: must be 0 for algorithm.name="
      "'scaffold', whose control variates are means of plain gradients"
    )


def _check_promise(config: FedConfig) -> None:
  privacy = config.privacy
  if privacy.clipping == "adaptive":
    _check_adaptive(config)
  if privacy.method == "none":
    return
  if (privacy.epsilon is None) == (privacy.noise_multiplier is None):
    raise UserError(
      f"privacy.epsilon={privacy.epsilon!r}: give it or privacy.noise_multiplier="
      f"{privacy.noise_multiplier!r}, exactly one of them"
    )
  if (privacy.simulated_cohort is None) != (privacy.simulated_clients is None):
    raise UserError(
      f"privacy.simulated_cohort={privacy.simulated_cohort}: needs privacy.simulated_clients="
      f"{privacy.simulated_clients}, and the other way round"
    )
  if privacy.simulated_cohort is not None:
    _check_simulated(config)


def _check_adaptive(config: FedConfig) -> None:
  privacy = config.privacy
  if privacy.method != "central" or privacy.simulated_cohort is not None:
    raise UserError(
      "privacy.clipping='adaptive': needs privacy.method='central', not "
      f"{privacy.method!r}, and no privacy.simulated_cohort"
    )


def _check_simulated(config: FedConfig) -> None:
  privacy, cohort = config.privacy, config.privacy.simulated_cohort or 0
  validate.integer_at_least(1, **{"privacy.simulated_cohort": cohort})
  if privacy.method != "central" or cohort < config.clients_per_round:
    raise UserError(
      f"privacy.simulated_cohort={cohort}: needs privacy.method='central' and must be >= "
      f"clients_per_round={config.clients_per_round}"
    )
  if cohort > (privacy.simulated_clients or 0):
    raise UserError(
      f"privacy.simulated_clients={privacy.simulated_clients}: must be >= "
      f"privacy.simulated_cohort={cohort}"
    )


def digest(config: FedConfig) -> bytes:
  """Of everything in the config but for where data lie and how the run is executed, in which
  the processes of one run may differ. Public."""
  fields = dataclasses.asdict(config)
  fields["data"].pop("data_dir")
  for name in ("execution", "num_devices", "num_threads"):
    fields.pop(name)
  return streams_lib.config_digest("federated", fields)


def streams(config: FedConfig, data: bytes) -> Streams:
  """Streams of the seed, of all that `digest` covers, and of the data: who holds which.

  Args:
    data: `dpjax.data.digest` of the federation.
  """
  keys = streams_lib.keys(config.seed, digest(config), data)
  return Streams(keys.init, keys.first, keys.second, keys.sampler)


def load_data(config: FedConfig) -> tuple[Federation, Any]:
  """(the federation, the test set) that a config names; `federate` takes them as `data`.

  Raises:
    UserError: data that are not there; the line says how to get them.
  """
  return _load(config, build.load_data)


def load_arrays(config: FedConfig) -> tuple[Federation, Any]:
  """As `load_data` without features: `dpjax.data.digest` of the two is the same."""
  return _load(config, build.load_arrays)


def _load(config: FedConfig, load: Callable) -> tuple[Federation, Any]:
  if config.partition.name == "shakespeare":
    train, test = shakespeare.shakespeare_federation(
      config.data.data_dir, min_chars=config.partition.min_chars
    )
    return train, test.dataset
  train, test = load(TrainConfig(data=config.data, model=config.model))
  return _partitioned(config, train), test


def _partitioned(config: FedConfig, train: Any) -> Federation:
  """A simulated federation: who holds what is part of the question, decided before any
  mechanism runs, so its law may read the labels. The number of users is the config's."""
  part = config.partition
  options: dict[str, Any] = {
    "iid": {},
    "dirichlet": {"alpha": part.alpha},
    "dirichlet_hsu": {"alpha": part.alpha},
    "shards": {"shards_per_client": part.shards_per_client},
    "quantity_skew": {"alpha": part.alpha},
    "power_law": {"exponent": part.exponent},
  }[part.name]
  if part.min_size is not None and part.name in ("dirichlet", "quantity_skew", "power_law"):
    options = options | {"min_size": part.min_size}
  deal = getattr(partition, part.name)
  indices = deal(train.y, num_clients=part.num_clients, seed=part.seed, **options)
  return Federation(train, indices)


def _sampler(config: FedConfig, num_clients: int) -> Any:
  if config.privacy.sampler == "fixed_size":
    size = config.clients_per_round
    if size != int(size):
      raise UserError(f"clients_per_round={size}: must be an integer for fixed_size")
    return sampling.FixedSizeSampler(batch_size=int(size), num_examples=num_clients)
  prob = config.clients_per_round / num_clients
  if names.is_path(config.privacy.sampler):
    return user_code.sampler(
      config.privacy.sampler, "privacy.sampler", num_examples=num_clients, prob=prob
    )
  return sampling.PoissonSampler(prob=prob, capacity=num_clients + 1)


def _plan(config: FedConfig, sampler: Any, divisor: float, noise: float | None) -> Plan:
  """A plan over clients; noise None: calibrated to the config's epsilon."""
  privacy = config.privacy
  numbers: dict[str, Any] = dict(
    sampler=sampler,
    num_steps=config.num_rounds,
    l2_clip_norm=privacy.l2_clip_norm,
    normalize_by=divisor,
    delta=privacy.delta,
    accountant=privacy.accountant,
  )
  if privacy.clipping == "adaptive":
    numbers["clipping"] = transforms.AdaptiveClipping(
      target_quantile=privacy.clip_quantile,
      learning_rate=privacy.clip_learning_rate,
      count_noise_std=privacy.clip_count_noise_std,
    )
  return _with_noise(config, noise, numbers)


def _with_noise(config: FedConfig, noise: float | None, numbers: dict[str, Any]) -> Plan:
  if noise is None:
    return Plan.calibrated(epsilon=config.privacy.epsilon or 0.0, **numbers)
  return Plan(noise_multiplier=noise, **numbers)


def _ftrl_plan(config: FedConfig, num_clients: int) -> Plan:
  """DP-FTRL on the server: as `build.make_plan`, with clients for examples."""
  privacy = PrivacyConfig(
    method="dp_ftrl",
    sampling_prob=config.clients_per_round / num_clients,
    ftrl=config.privacy.ftrl,
  )
  ftrl.check(privacy)
  numbers: dict[str, Any] = dict(
    sampler=ftrl.sampler(privacy, config.num_rounds, num_clients, num_clients + 1),
    num_steps=config.num_rounds,
    l2_clip_norm=config.privacy.l2_clip_norm,
    normalize_by=ftrl.expected_share(privacy) * num_clients,
    delta=config.privacy.delta,
    accountant=config.privacy.accountant,
    correlation=ftrl.correlation(privacy, config.num_rounds),
  )
  return _with_noise(config, config.privacy.noise_multiplier, numbers)


def make_plan(config: FedConfig, num_clients: int) -> tuple[Plan, Plan]:
  """(what runs, what is reported). They differ for a simulated cohort alone.

  The noise on the mean is that of the reported plan in both: z C / simulated_cohort.
  """
  privacy = config.privacy
  _check_cohort(config, num_clients)
  if privacy.method == "dp_ftrl":
    plan = _ftrl_plan(config, num_clients)
    return plan, plan
  sampler = _sampler(config, num_clients)
  if privacy.method not in _CENTRAL:
    plan = Plan(
      sampler=sampler,
      noise_multiplier=0.0,
      l2_clip_norm=math.inf,
      normalize_by=config.clients_per_round,
      num_steps=config.num_rounds,
      delta=privacy.delta,
    )
    return plan, plan
  noise = privacy.noise_multiplier
  cohort, population = privacy.simulated_cohort, privacy.simulated_clients
  if cohort is None or population is None:
    plan = _plan(config, sampler, config.clients_per_round, noise)
    return plan, plan
  whole = sampling.PoissonSampler(prob=cohort / population, capacity=population + 1)
  reported = _plan(config, whole, cohort, noise)
  scaled = reported.noise_multiplier * config.clients_per_round / cohort
  return _plan(config, sampler, config.clients_per_round, scaled), reported


def _central_promise(config: FedConfig, ran: Plan, reported: Plan, clients: int) -> Promise:
  simulated = reported is not ran
  kind = "simulated" if simulated else user_code.kind(ran.sampler)
  of = config.privacy.simulated_clients if simulated else clients

  def statement(rounds: int) -> str:
    text = reported.statement(of or clients, rounds, unit="user")
    return f"{_simulation_note(config)}\n\n{text}" if simulated else text

  return Promise(
    kind=kind if reported.is_private else "none",
    delta=reported.delta,
    relation=str(reported.neighboring_relation),
    step_event=ran.step_event,
    remaining_event=ran.remaining_event,
    curve=reported.epsilon_curve,
    statement=statement,
  )


def _simulation_note(config: FedConfig) -> str:
  privacy = config.privacy
  return (
    f"SIMULATED. The noise is that of cohorts of {privacy.simulated_cohort} out of "
    f"{privacy.simulated_clients} clients; this run had cohorts of "
    f"{config.clients_per_round:g}. What follows holds for such a deployment. It is NOT a "
    "guarantee for the clients whose data were used here."
  )


def local_noise(config: FedConfig) -> float | None:
  """Noise multiplier on a client's message, calibrated for a message in every round; None
  where clients add no noise."""
  privacy = config.privacy
  if privacy.method not in ("local", "both"):
    return None
  if privacy.method == "both":
    return privacy.local_noise_multiplier
  if privacy.noise_multiplier is not None:
    return privacy.noise_multiplier
  return accounting.calibrate_noise_multiplier(
    lambda z: placement.local_event(z, config.num_rounds),
    epsilon=privacy.epsilon or 0.0,
    delta=privacy.delta,
    neighboring_relation=NeighboringRelation.REPLACE_ONE,
  )


_LOCAL_NOTE = (
  "Against a server that gets the clients' noisy messages and nothing else. In this run one "
  "program simulated server and clients: it held all data and the key of every client's noise, "
  "so nothing is promised against whoever runs it or knows its seed. Clients that draw their "
  "own noise are those of dpjax.federated.transport.flower."
)


def _local_promise(config: FedConfig, num_clients: int) -> Promise:
  """Against the server itself; for a client that takes part in every round."""
  noise, delta = local_noise(config) or 0.0, config.privacy.delta
  words: dict[str, Any] = dict(
    delta=delta, neighboring_relation=str(NeighboringRelation.REPLACE_ONE)
  )
  return Promise(
    kind="proved" if noise else "none",
    delta=delta,
    relation=str(NeighboringRelation.REPLACE_ONE),
    step_event=lambda step: placement.local_event(noise),
    remaining_event=lambda start: placement.local_event(noise, config.num_rounds - start),
    curve=lambda rounds: np.array(
      [placement.local_epsilon(noise, delta, int(t)) if t else 0.0 for t in rounds]
    ),
    statement=lambda rounds: (
      f"{_LOCAL_NOTE}\n\n"
      + accounting.privacy_statement(
        placement.local_event(noise, rounds), num_examples=num_clients, unit="user", **words
      )
    ),
  )


def _no_promise(plan: Plan) -> Promise:
  text = "Privacy statement\n\nNone: no epsilon is proved for this run."
  none = lambda rounds: np.full(len(rounds), math.inf)
  return Promise(
    kind="none",
    delta=plan.delta,
    relation="",
    step_event=plan.step_event,
    remaining_event=plan.remaining_event,
    curve=none,
    statement=lambda rounds: text,
  )


def _promise(config: FedConfig, ran: Plan, reported: Plan, num_clients: int) -> Promise:
  if config.privacy.method in _CENTRAL:
    return _central_promise(config, ran, reported, num_clients)
  if config.privacy.method == "local":
    return _local_promise(config, num_clients)
  return _no_promise(ran)


def _aggregator(config: FedConfig, plan: Plan, key: jax.Array) -> federated.Aggregator:
  algorithm = config.algorithm
  if config.privacy.method in _CENTRAL:
    return federated.central(plan, key)
  if names.is_path(algorithm.aggregator):
    return user_code.aggregator(algorithm.aggregator)
  return {
    "mean": federated.weighted_mean,
    "median": federated.median,
    "trimmed_mean": lambda: federated.trimmed_mean(algorithm.trim),
    "krum": lambda: federated.krum(algorithm.num_byzantine),
    "geometric_median": federated.geometric_median,
  }[algorithm.aggregator]()


def _compressor(config: FedConfig) -> federated.Compressor | None:
  bits, share = config.algorithm.compression_bits, config.algorithm.compression_share
  return {
    "none": lambda: None,
    "quantize": lambda: federated.quantize(bits),
    "rotated": lambda: federated.rotated(bits),
    "drive": federated.drive,
    "top_k": lambda: federated.top_k(share),
  }[config.algorithm.compression]()


def _wrapping(config: FedConfig) -> dict[str, Any]:
  """Noise on the client first, then compression: that is post-processing."""
  compressor, feedback = _compressor(config), config.algorithm.compression == "top_k"
  noise = local_noise(config)

  def wrap(client: federated.ClientAlgorithm) -> federated.ClientAlgorithm:
    if noise is not None:
      client = federated.client_noise(
        client, l2_clip_norm=config.privacy.l2_clip_norm, noise_multiplier=noise
      )
    if compressor is None:
      return client
    return federated.compressed(client, compressor, error_feedback=feedback)

  memory = lambda params: federated.error_memory(None, {"delta": params})
  return {"wrap": wrap, "memory": memory if feedback else None}


def _weighting(config: FedConfig) -> Any:
  return {
    "uniform": federated.uniform,
    "examples": federated.by_examples,
    "capped": federated.capped(config.algorithm.weight_cap),
  }[config.algorithm.weighting]


def optimizer(config: OptimizerConfig) -> Any:
  """The Optax optimizer of a client; it starts afresh in every round, at one rate."""
  if names.is_path(config.name):
    return user_code.optimizer(config.name, config.learning_rate, "client_optimizer")
  return _OPTIMIZERS[config.name](config.learning_rate, config)


def server_optimizer(config: OptimizerConfig, num_rounds: int) -> Any:
  """The server's: SGD, or algorithm 2 of Reddi et al. 2021. Its learning rate may follow a
  schedule over the rounds."""
  rate: Any = config.learning_rate
  if config.schedule != "constant":
    rate = build.learning_rate_schedule(config, num_rounds)
  if names.is_path(config.name):
    return user_code.optimizer(config.name, rate, "server_optimizer")
  if config.name == "sgd":
    return _OPTIMIZERS["sgd"](rate, config)
  constant = config.schedule == "constant"
  scale = optax.scale(rate) if constant else optax.scale_by_schedule(rate)
  return optax.chain(fed_opt(config.name, 1.0), scale)


def _algorithm(
  config: FedConfig, loss_fn: Any, plan: Plan, random: Streams, num_clients: int
) -> federated.FederatedAlgorithm:
  algorithm, privacy = config.algorithm, config.privacy
  client_tx = optimizer(config.client_optimizer)
  server_tx = server_optimizer(config.server_optimizer, config.num_rounds)
  inner = execution.by_name(
    config.execution, num_devices=config.num_devices, num_threads=config.num_threads
  )
  common: dict[str, Any] = dict(
    aggregator=_aggregator(config, plan, random.noise),
    map_clients=processes.process_clients(inner),
    key=random.client,
  )
  weighted = common | {"weighting": _weighting(config)}
  if names.is_path(algorithm.name):
    return user_code.algorithm(
      algorithm.name,
      loss_fn,
      client_tx,
      server_tx,
      private=privacy.method != "none",
      **weighted,
    )
  if algorithm.name == "fed_avg":
    return federated.fed_avg(loss_fn, client_tx, server_tx, **weighted, **_wrapping(config))
  if algorithm.name == "fed_prox":
    return federated.fed_prox(
      loss_fn, client_tx, server_tx, mu=algorithm.mu, **weighted, **_wrapping(config)
    )
  if algorithm.name == "fed_nova":
    momentum = federated.momentum_steps(config.client_optimizer.momentum)
    tau_eff = algorithm.tau_eff
    return federated.fed_nova(
      loss_fn, client_tx, server_tx, steps=momentum, tau_eff=tau_eff, **weighted
    )
  if algorithm.name == "scaffold":
    public = None if privacy.method == "none" else config.clients_per_round
    return federated.scaffold(
      loss_fn,
      client_tx,
      server_tx,
      client_learning_rate=config.client_optimizer.learning_rate,
      num_clients=num_clients,
      expected_cohort=public,
      **common,
    )
  if algorithm.name == "mime_lite":
    return federated.mime_lite(loss_fn, client_tx, **weighted)
  return federated.fed_sgd(loss_fn, server_tx, **weighted)


def build_run(
  config: FedConfig, data: tuple[Any, Any] | None = None, random: Streams | None = None
) -> FedRun:
  """Every object of a federated run; deterministic in its arguments.

  Args:
    data: what `load_data` returns; None to load what the config names.
    random: None for the streams of config and data.
  """
  check(config)
  central = TrainConfig(data=config.data, model=config.model, loss=config.loss)
  federation, test = load_data(config) if data is None else data
  num_clients = federation.num_clients
  random = streams(config, data_lib.digest(federation)) if random is None else random
  plan, reported = make_plan(config, num_clients)
  task = build.make_task(central, federation.dataset)
  # load_data has standardised the features of a scattering head already
  fixed = {"num_groups": None} if models.needs_features(config.model.name) else {}
  model = build.make_model(config.model, task.width(federation.dataset), **fixed)
  first = jnp.zeros_like(federation.dataset.x[:1])  # its shape alone: see build.build
  return FedRun(
    plan=plan,
    promise=_promise(config, plan, reported, num_clients),
    algorithm=_algorithm(config, task.loss(model.apply), plan, random, num_clients),
    params=build.init_params(config.model, model, random.init, first),
    apply=model.apply,
    random=random,
    federation=federation,
    work=federated.LocalWork(**dataclasses.asdict(config.local)),
    test=test,
    task=task,
  )
