"""From a `FedConfig` to the objects of a federated run. No training happens here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax

from dpjax import data as data_lib
from dpjax import federated, names, validate
from dpjax.data import Federation, partition, shakespeare
from dpjax.federated import execution, processes
from dpjax.federated.server_optimizers import fed_opt
from dpjax.plan import Plan
from dpjax.runs import bounds, unused, user_code
from dpjax.runs import streams as streams_lib
from dpjax.runs.central import build as build_central
from dpjax.runs.central.config import OptimizerConfig, TrainConfig
from dpjax.runs.federated import facts, privacy
from dpjax.runs.federated.config import FedConfig
from dpjax.runs.loop import Job, Work, every
from dpjax.runs.promise import Promise
from dpjax.runs.streams import Streams
from dpjax.validate import UserError

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
_OPTIMIZERS: dict[str, Callable[[Any, OptimizerConfig], Any]] = {
  "sgd": lambda rate, c: optax.sgd(rate, momentum=c.momentum or None),
  "adam": lambda rate, c: optax.adam(rate, b1=0.9, b2=0.99, eps=1e-3),
  "yogi": lambda rate, c: optax.yogi(rate, b1=0.9, b2=0.99, eps=1e-3),
  "adagrad": lambda rate, c: optax.adagrad(rate, 0.0, eps=1e-3),
}
_OF_SGD = ("fed_nova", "scaffold")  # derived for clients that take steps of plain SGD


class FedRun(NamedTuple):
  """Every object of a federated run."""

  plan: Plan  # of what runs: sampler and server noise
  promise: Promise
  algorithm: federated.FederatedAlgorithm
  params: Any
  apply: Any
  random: Streams
  federation: Federation
  work: federated.LocalWork
  test: Any
  task: build_central.Task


@bounds.names_fields
def check(config: FedConfig) -> None:
  """Raises UserError for what can be told without data."""
  bounds.typed(config)
  bounds.federation(config)
  one_of = {
    "partition.name": (PARTITIONS, config.partition.name),
    "algorithm.weighting": (WEIGHTINGS, config.algorithm.weighting),
    "algorithm.compression": (COMPRESSIONS, config.algorithm.compression),
    "privacy.method": (privacy.METHODS, config.privacy.method),
    "privacy.clipping": (privacy.CLIPPINGS, config.privacy.clipping),
    "execution": (execution.NAMES, config.execution),
  }
  for name, (choices, value) in one_of.items():
    validate.one_of(choices, **{name: value})
  or_path = {
    "algorithm.name": (ALGORITHMS, config.algorithm.name),
    "algorithm.aggregator": (AGGREGATORS, config.algorithm.aggregator),
    "privacy.sampler": (privacy.SAMPLERS, config.privacy.sampler),
    "client_optimizer.name": (_OPTIMIZERS, config.client_optimizer.name),
    "server_optimizer.name": (_OPTIMIZERS, config.server_optimizer.name),
  }
  for name, (choices, value) in or_path.items():
    names.one_of(choices, **{name: value})
  if config.partition.name == "shakespeare":
    _check_natural(config)
  else:
    privacy.check_cohort(config, config.partition.num_clients)
  _check_stop(config)
  _check_combination(config)
  privacy.check(config)
  unused.refuse(config, unused.of_federation(config))


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


def _check_combination(config: FedConfig) -> None:
  algorithm, central = config.algorithm, config.privacy.method in privacy.CENTRAL
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


def digest(config: FedConfig) -> bytes:
  """Of everything in the config but for where data lie and how the run is executed, in which
  the processes of one run may differ. Public."""
  fields = dataclasses.asdict(config)
  fields["data"].pop("data_dir")
  for name in ("execution", "num_devices", "num_threads"):
    fields.pop(name)
  if config.loss == "auto":
    fields.pop("loss")
  return streams_lib.config_digest("federated", fields)


def streams(config: FedConfig, data: bytes) -> Streams:
  """Streams of the seed, of all that `digest` covers, and of the data: who holds which.

  Args:
    data: `dpjax.data.digest` of the federation.
  """
  return streams_lib.derived(config.seed, digest(config), data)


@bounds.names_fields
def load_data(config: FedConfig, *, features: bool = True) -> tuple[Federation, Any]:
  """(the federation, the test set) that a config names; `build` takes them as `data`.

  Args:
    features: as of `central.build.load_data`.

  Raises:
    UserError: data that are not there; the line says how to get them.
  """
  if config.partition.name == "shakespeare":
    train, test = shakespeare.shakespeare_federation(
      config.data.data_dir, min_chars=config.partition.min_chars
    )
    return train, test.dataset
  train, test = build_central.load_data(_central(config), features=features)
  return _partitioned(config, train), test


def _central(config: FedConfig) -> TrainConfig:
  return TrainConfig(data=config.data, model=config.model, loss=config.loss)


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


def _aggregator(config: FedConfig, plan: Plan, key: jax.Array) -> federated.Aggregator:
  algorithm = config.algorithm
  if config.privacy.method in privacy.CENTRAL:
    return federated.central(plan, key)
  if names.is_path(algorithm.aggregator):
    return user_code.aggregator(algorithm.aggregator).drawn_by(plan)
  chosen = {
    "mean": federated.weighted_mean,
    "median": federated.median,
    "trimmed_mean": lambda: federated.trimmed_mean(algorithm.trim),
    "krum": lambda: federated.krum(algorithm.num_byzantine),
    "geometric_median": federated.geometric_median,
  }[algorithm.aggregator]()
  return chosen.drawn_by(plan)


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
  noise = privacy.local_noise(config)

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
    rate = build_central.learning_rate_schedule(config, num_rounds)
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
  algorithm = config.algorithm
  client_tx = optimizer(config.client_optimizer)
  server_tx = server_optimizer(config.server_optimizer, config.num_rounds)
  inner = execution.by_name(
    config.execution, num_devices=config.num_devices, num_threads=config.num_threads
  )
  common: dict[str, Any] = dict(
    aggregator=_aggregator(config, plan, random.noise),
    map_clients=processes.process_clients(inner),
    key=random.local,
  )
  weighted = common | {"weighting": _weighting(config)}
  if names.is_path(algorithm.name):
    return user_code.algorithm(
      algorithm.name,
      loss_fn,
      client_tx,
      server_tx,
      private=config.privacy.method != "none",
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
    public = None if config.privacy.method == "none" else config.clients_per_round
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


@bounds.names_fields
def assemble(
  config: FedConfig, data: tuple[Any, Any] | None = None, random: Streams | None = None
) -> FedRun:
  """Every object of a federated run; deterministic in its arguments.

  Args:
    data: what `load_data` returns; None to load what the config names.
    random: None for the streams of config and data.
  """
  check(config)
  federation, test = load_data(config) if data is None else data
  num_clients = federation.num_clients
  random = streams(config, data_lib.digest(federation)) if random is None else random
  plan, reported = privacy.make_plan(config, num_clients)
  task, model, params = build_central.start(_central(config), federation.dataset, random)
  return FedRun(
    plan=plan,
    promise=privacy.make_promise(config, plan, reported, num_clients),
    algorithm=_algorithm(config, task.loss(model.apply), plan, random, num_clients),
    params=params,
    apply=model.apply,
    random=random,
    federation=federation,
    work=federated.LocalWork(**dataclasses.asdict(config.local)),
    test=test,
    task=task,
  )


def build(config: FedConfig, data: tuple[Any, Any] | None = None) -> Job:
  """The job of a federated run: rounds for steps, users for examples.

  Args:
    data: what `load_data` returns, to share them between runs.
  """
  check(config)
  work = lambda *parts: _work(config, assemble(config, *parts))
  return build_central.job_on_data(config, digest(config), load_data, data, work)


def _work(config: FedConfig, fed: FedRun) -> Work:
  target, total = config.stop_at_accuracy, config.num_rounds
  return Work(
    num_steps=total,
    init=lambda: fed.algorithm.init(fed.params, fed.federation.num_clients),
    step=fed.algorithm.round,
    draws=lambda start: fed.algorithm.cohorts(
      fed.federation, fed.work, rng=fed.random.sampler, start=start
    ),
    released=federated.params_of,
    evaluate=lambda state: fed.task.evaluate(
      fed.apply, federated.params_of(state), fed.test
    ),
    promise=fed.promise,
    row_at=lambda step: every(config.eval_every, step, total),
    observe=lambda state, info, step: facts.observed(config, fed, state, info),
    enough=lambda row: target is not None and row["test_accuracy"] >= target,
    save_every=config.checkpoint_every,
    name="rounds",
    steps_are="communication rounds",
    describe=lambda state, stated, rows: facts.of(config, fed, state, rows),
  )
