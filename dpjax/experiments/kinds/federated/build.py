"""Builds the objects of a federated run from a `FedConfig`. No training happens here."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import optax

from dpjax import federated, secure, trees
from dpjax.data import Federation
from dpjax.data.target_kinds import needs_classes
from dpjax.experiments.config import common, optimizers, sections
from dpjax.experiments.config.choices import Setting, UsersFunction, name_of, to_dict
from dpjax.experiments.config.naming import within
from dpjax.experiments.kinds import audits
from dpjax.experiments.kinds.central import build as build_central
from dpjax.experiments.kinds.central import tasks
from dpjax.experiments.kinds.central.facts import shows_data
from dpjax.experiments.kinds.federated import (
  audit,
  client_scores,
  cohort_sizes,
  distributed,
  facts,
  loading,
  privacy,
  records,
  secure_sums,
)
from dpjax.experiments.kinds.federated import user_code as own_parts
from dpjax.experiments.kinds.federated.client_scores import ClientScores
from dpjax.experiments.kinds.federated.config import (
  Both,
  FedConfig,
  Local,
  ServerNoise,
  ServerOptimizerConfig,
  aggregators_that,
  algorithm_of,
  algorithms_that,
)
from dpjax.experiments.kinds.federated.loading import load_data as load_data
from dpjax.experiments.kinds.federated.loading import with_features as with_features
from dpjax.experiments.run import guarantee, workdir, writers
from dpjax.experiments.run.experiment import Experiment, Phase, Story, every, single
from dpjax.experiments.run.guarantee import Guarantee
from dpjax.experiments.run.run_keys import RunKeys
from dpjax.federated.algorithms.fed_bn import check_parts
from dpjax.federated.compression import error_memory
from dpjax.federated.described import RunNumbers
from dpjax.federated.execution import named
from dpjax.federated.execution.client_processes import process_clients
from dpjax.federated.round import params_of
from dpjax.federated.server_optimizers import fed_opt
from dpjax.federated.silos import Silos
from dpjax.names import is_path
from dpjax.parallel import client_states, step_program
from dpjax.plan import Plan
from dpjax.secure.distributed_noise import SkellamSum
from dpjax.secure.encoding import Encoding
from dpjax.validate import UserError
from dpjax.zoo.datasets.published import has_owners

# Fields that are passed to `named.by_name`.
_EXECUTED = ("num_devices", "num_threads", "memory_budget_gb")
# Fields that may differ between the processes of one run.
ELSEWHERE = ("execution", *_EXECUTED)
Wrapping = dict[str, Any]


class FedRun(NamedTuple):
  """Holds every object of a federated run."""

  config: FedConfig
  plan: Plan  # plan that runs: sampler and server noise
  guarantee: Guarantee
  params: Any
  apply: Any
  random: RunKeys
  federation: Federation
  num_clients: int  # number that the mechanism depends on; see `privacy.public_size`
  work: federated.LocalWork
  test: Any
  task: tasks.Task
  audited: audit.Audited  # the canaries in `federation`
  mechanism: SkellamSum | None = None  # for privacy="distributed"
  silos: Silos | None = None  # for privacy="records"
  algorithm: Any = None  # a `FederatedAlgorithm`, by `make_algorithm` from all of these


def check(config: FedConfig, *, draws_cohorts: bool = True) -> None:
  """Raises UserError if the config is wrong; loads no data.

  Args:
    draws_cohorts: False for an attack on single messages, of which no cohort can be too small.
  """
  common.check_types(config)
  config = audit.resolve(config)
  sections.check_range(config.data, config.model)
  named.check(config.execution, **_execution_options(config))
  for chosen in (config.weighting, config.aggregator, config.compression):
    if isinstance(chosen, Setting):
      # Making a function checks its arguments.
      chosen.make()
  _check_partition(config)
  if not config.is_dealt:
    _check_natural(config)
  elif not config.protects_records:
    privacy.check_cohort(config, config.partition.num_clients)
    if draws_cohorts:
      privacy.make_sampler(config, config.partition.num_clients)
  _check_stop(config)
  _check_combination(config)
  records.check(config)
  privacy.check(config)
  client_scores.check(config)
  if draws_cohorts and _knows_cohorts(config):
    cohort_sizes.check(config, config.partition.num_clients)
  audit.check(config)
  if config.writer is not None:
    from dpjax.experiments.run import row_hooks  # few runs have a hook

    row_hooks.check(config.writer, release=config.release)
  _check_read(config)


def _execution_options(config: FedConfig) -> dict[str, Any]:
  return {name: getattr(config, name) for name in _EXECUTED}


def _check_read(config: FedConfig) -> None:
  """Raises UserError for a field that is set although this run would not read it."""
  read = functools.partial(common.read_if, config)
  algorithm = algorithm_of(config)
  read(not config.is_dealt, "users that the data name", "data.num_users")
  fields_of_clients = ("partition.client_id", "partition.max_examples")
  read(not is_path(config.data.name), "clients that dpjax reads", *fields_of_clients)
  read(
    not has_owners(config.data.name), "data that do not name their clients",
    "partition.client_id",
  )  # fmt: skip
  keeping = " or ".join(map(repr, algorithms_that(lambda row: row.keeps_state)))
  keeps = algorithm.keeps_state or name_of(config, "compression") == "top_k"
  read(
    keeps,
    f"clients that keep something (algorithm={keeping}, compression='top_k')",
    "client_state",
  )
  if config.protects_records:
    read(False, "users whose number is a secret", "data.num_users")
    read(False, "a sampler of a silo's records that keeps all", "local.max_examples")


def _knows_cohorts(config: FedConfig) -> bool:
  """Returns whether the config alone says how large cohorts are, and how large they must be.

  The data name the clients of a natural partition, and a user's own aggregator must be loaded.
  """
  # All silos take part, as many as the data have.
  of_silos = config.protects_records
  return (
    config.is_dealt and not of_silos and not isinstance(config.aggregator, UsersFunction)
  )


def _check_partition(config: FedConfig) -> None:
  partition = config.partition
  shape = getattr(partition, "shape", None)
  if shape is not None and not (shape and all(side > 0 for side in shape)):
    raise UserError(
      "must be positive integers, or none", field="partition.shape", value=shape
    )
  without_field = is_path(config.data.name) or has_owners(config.data.name)
  if getattr(partition, "client_id", None) == "" and not without_field:
    raise UserError(
      "must name the field that says whose each record is",
      field="partition.client_id",
      value="",
    )


def _check_natural(config: FedConfig) -> None:
  """Raises UserError for fields that do not fit a partition whose clients come from the data."""
  partition = name_of(config, "partition")
  allowed: dict[str, Any] = {"data.limit": None}
  if partition == "leaf":
    allowed["data.declaration"] = None
  if partition == "shakespeare":
    allowed |= {"data.name": "shakespeare", "data.center": False}
    # The loader of these data declares the number of classes, so the config must not.
    allowed["data.num_classes"] = None
    # There is no other language model for clients.
    allowed["model.name"] = "transformer"
  for path, value in allowed.items():
    common.only(config, path, [value], f" for partition={partition!r}")


def _check_stop(config: FedConfig) -> None:
  """Raises UserError for a private run with `stop_at_accuracy`.

  The guarantee does not account for a stop that depends on results.
  """
  target = config.stop_at_accuracy
  if target is not None and config.is_private:
    raise UserError(
      "needs privacy='none'; a private run pays for its num_rounds, which "
      "must not depend on what it sees",
      field="stop_at_accuracy",
      value=target,
    )


def _check_combination(config: FedConfig) -> None:
  algorithm = algorithm_of(config)
  means = aggregators_that(lambda row: row.is_mean)
  if isinstance(config.privacy, ServerNoise):
    why = f" with privacy={name_of(config, 'privacy')!r}: no epsilon is proved for it"
    common.only(config, "aggregator", means, why)
  # The weight of a silo is its declared number of records, which is public.
  if config.protects_users and name_of(config, "weighting") == "examples":
    raise UserError(
      "a client's weight has no bound; use 'uniform' or 'capped' with privacy",
      field="weighting",
      value="examples",
    )
  # The algorithm refuses it, too, but is made only where the data are there: a sweep would try all
  # of its runs.
  option = algorithm.private_if
  is_noisy = config.protects_users and not isinstance(config.privacy, Local)
  if is_noisy and option and getattr(config.algorithm, option, 0) is None:
    raise UserError(
      "must be a public number with noise on the sum of the messages",
      field=f"algorithm.{option}",
      value=None,
    )
  _check_client_optimizer(config)
  _check_secure_sum(config)
  compression = name_of(config, "compression")
  if compression == "top_k" and config.compression.share == 1:
    raise UserError(
      "keeps every entry; must be below 1", field="compression.share", value=1.0
    )
  compressed = compression != "none"
  wraps = compressed or isinstance(config.privacy, Local | Both)
  if wraps and not algorithm.wraps_clients:
    known = algorithms_that(lambda row: row.wraps_clients)
    common.only(config, "algorithm", known, " with compression or noise on the client")


def _check_secure_sum(config: FedConfig) -> None:
  chosen = config.secure_sum
  if not config.is_summed:
    return
  secure_sums.check(chosen, config.clients_per_round)
  allowed_by_field = {
    "aggregator": aggregators_that(lambda row: row.is_mean),
    "compression": ("none",),
    "weighting": ("uniform", "capped"),
    "privacy": privacy.SUMMED,
  }
  if not chosen.simulated:
    allowed_by_field["execution"] = ("auto", "loop", "vmap")
  for path, allowed in allowed_by_field.items():
    common.only(config, path, allowed, " with a secure_sum")


def _check_client_optimizer(config: FedConfig) -> None:
  """Raises UserError for a client optimizer that the algorithm's derivation does not cover."""
  algorithm = algorithm_of(config)
  whose = f" for algorithm={algorithm.name!r}, whose"
  if algorithm.client_rule:
    why = f"{whose} derivation counts plain gradient steps"
    common.only(config, "client_optimizer.rule", [algorithm.client_rule], why)
  if not algorithm.client_momentum:
    why = f"{whose} control variates are means of plain gradients"
    common.only(config, "client_optimizer.rule.momentum", [0], why)


def secure_aggregator(fed: FedRun, num_clients: int) -> federated.Aggregator:
  """Returns the aggregator whose server sees only the sum of the messages.

  Args:
    num_clients: largest number of clients in a sum if the sampler does not fix this number.
  """
  config = fed.config
  chosen = config.secure_sum
  cohort = config.clients_per_round
  dropout = chosen.dropout(config.seed)
  if fed.mechanism is not None:
    seeds = {"seed": distributed.seed_of(fed.random.noise), "rotation": config.seed}
    protocol = chosen.protocol(cohort)
    mean = secure.skellam_mean(protocol, fed.mechanism, dropout=dropout, **seeds)
    return mean.drawn_by(fed.plan)
  # A Poisson cohort may hold every client, and the modulus must exceed the sum of its messages.
  most = num_clients if config.privacy.sampler.name != "fixed_size" else int(cohort)
  encoding = Encoding(most, chosen.largest_value, chosen.bits)
  mean = secure.secure_mean(chosen.protocol(cohort), encoding, dropout=dropout)
  return mean.drawn_by(fed.plan)


def _aggregator(fed: FedRun) -> federated.Aggregator:
  config = fed.config
  if config.is_summed:
    return secure_aggregator(fed, fed.num_clients)
  if isinstance(config.privacy, ServerNoise):
    return federated.central(fed.plan, fed.random.noise)
  if isinstance(config.aggregator, UsersFunction):
    return own_parts.aggregator(config.aggregator.path).drawn_by(fed.plan)
  return config.aggregator.make().drawn_by(fed.plan)


def client_of(
  config: FedConfig, loss_fn: Any, *, guessed: bool = False
) -> tuple[federated.ClientAlgorithm, Any]:
  """Returns (client, memory) of a FedAvg run.

  `memory` is a function parameters -> the client's state before the first round; None: the client
  keeps no state.

  Args:
    guessed: whether the client is an attacker's simulation. The attacker has no key, so noise and
      compression are left out, but the clip that comes before the noise is not.
  """
  tx = client_optimizer(config)
  weighting = config.weighting.make()
  client = federated.local_training(loss_fn, tx, weighting=weighting)
  wrapping = _wrapping(config, guessed=guessed)
  return wrapping["wrap"](client), wrapping["memory"]


def _wrapping(
  config: FedConfig, *, guessed: bool = False, audited: audit.Audited | None = None
) -> Wrapping:
  """Returns a dict: "wrap" is a function that wraps a client, and "memory" is that of `client_of`.
  The wrapper adds the client's noise, then compresses, which is post-processing."""
  # Without feedback, "top_k" would never send a coordinate that is always small.
  feedback = name_of(config, "compression") == "top_k" and not guessed
  compressor = None if guessed else config.compression.make()
  noise = privacy.local_noise(config)
  if guessed and noise is not None:
    noise = 0.0
  clip_norm = getattr(config.privacy, "l2_clip_norm", 0.0)

  def wrap(client: federated.ClientAlgorithm) -> federated.ClientAlgorithm:
    client = client if audited is None else audited.hide(client)
    if noise is not None:
      client = federated.client_noise(
        client, l2_clip_norm=clip_norm, noise_multiplier=noise
      )
    if compressor is None:
      return client
    return federated.compressed(client, compressor, error_feedback=feedback)

  memory = lambda params: error_memory(None, {"delta": params})
  wrapping = {"wrap": wrap, "memory": memory if feedback else None}
  return wrapping if audited is None else audited.heard(wrapping)


def client_optimizer(config: FedConfig) -> optax.GradientTransformation:
  """Returns a client's optimizer, with a constant rate and a new state in every round."""
  section = config.client_optimizer
  return optimizers.make(section, section.learning_rate, section="client_optimizer")


def server_optimizer(config: ServerOptimizerConfig, num_rounds: int) -> Any:
  """Returns the server's optimizer: SGD, an adaptive rule (algorithm 2 of Reddi et al. 2021), or a
  user's own. The learning rate may follow a schedule over the rounds."""
  rate: Any = config.learning_rate
  if config.schedule != "constant":
    rate = build_central.learning_rate_schedule(config, num_rounds)
  if isinstance(config.rule, UsersFunction) or name_of(config, "rule") == "sgd":
    return optimizers.make(config, rate, section="server_optimizer")
  constant = config.schedule == "constant"
  scale = optax.scale(rate) if constant else optax.scale_by_schedule(rate)
  # `fed_opt` takes a number as its rate, but a schedule is a function. So `fed_opt` gets rate 1,
  # and the updates are scaled afterwards.
  return optax.chain(fed_opt(name_of(config, "rule"), 1.0), scale)


def make_algorithm(
  fed: FedRun,
  around: Callable[[Wrapping], Wrapping] = lambda wrapping: wrapping,
  before: Callable[[federated.Aggregator], federated.Aggregator] = lambda aggregator: (
    aggregator
  ),
) -> federated.FederatedAlgorithm:
  """Returns the algorithm of a run, or its form under attack.

  Args:
    around: function that changes the dict of `_wrapping`, if the algorithm wraps clients.
    before: function that wraps the aggregator, to change the messages that it gets.
  """
  config = fed.config
  random = fed.random
  silos = fed.silos
  loss_fn = fed.task.loss(fed.apply)
  described = algorithm_of(config)
  client_tx = client_optimizer(config)
  server_tx = server_optimizer(config.server_optimizer, config.num_rounds)
  server_tx = fed.audited.watch(server_tx)
  inner = named.by_name(config.execution, **_execution_options(config))
  aggregator = before(_aggregator(fed))
  # Arguments of every algorithm. Only some algorithms also take `weighting`.
  common: dict[str, Any] = {
    "aggregator": aggregator,
    "map_clients": process_clients(fed.audited.sending(inner)),
    "key": random.local,
  }
  if described.weighted:
    common["weighting"] = config.weighting.make()
  if isinstance(config.algorithm, UsersFunction):
    return own_parts.algorithm(
      config.algorithm.path,
      loss_fn,
      client_tx,
      server_tx,
      guarded=config.is_private or config.is_summed,
      **common,
    )
  options = described.from_run(
    RunNumbers(
      # The number without canaries, so that no divisor reveals how many canaries are in.
      num_clients=fed.num_clients,
      # With a guarantee the actual size of a cohort may be secret. So the expected size is used.
      # The silos of a round are public, however.
      expected_cohort=(
        config.clients_per_round if config.is_private and silos is None else None
      ),
      client_learning_rate=config.client_optimizer.learning_rate,
      # A rule without momentum has no field `momentum`.
      client_momentum=getattr(config.client_optimizer.rule, "momentum", 0.0),
    )
  )
  if silos is not None:
    options["silos"] = silos
  if described.wraps_clients:
    options |= around(_wrapping(config, audited=fed.audited))
  offered = {"client_tx": client_tx, "server_tx": server_tx}
  txs = [offered[name] for name in described.optimizers]
  algorithm = config.algorithm.make(loss_fn, *txs, **common, **options)
  algorithm = secure.forgiving(algorithm, refused=writers.warn)
  return fed.audited.seeing(algorithm)


def assemble(
  config: FedConfig, data: tuple[Any, Any] | None = None, random: RunKeys | None = None
) -> FedRun:
  """Builds every object of a federated run, deterministically from its arguments.

  Args:
    data: result of `load_data`; None: it is loaded.
    random: keys; None: those of a new run.
  """
  check(config)
  config = audit.resolve(config)
  data = load_data(config) if data is None else data
  keys = Experiment(config).new_keys() if random is None else random
  return assemble_loaded(config, data, keys)


def assemble_loaded(config: FedConfig, data: tuple[Any, Any], random: RunKeys) -> FedRun:
  """Builds every object of a run whose config is checked and resolved; see `assemble`."""
  federation, test = data
  config = records.resolve(config, federation.num_clients)
  # The number is taken before canaries are inserted, since no divisor may reveal how many are in.
  num_clients = privacy.public_size(config, federation)
  # Cohorts check their capacity against the number that `federation` declares.
  federation = dataclasses.replace(federation, nominal_users=num_clients)
  plan, reported = privacy.make_plan(config, num_clients)
  silos = records.make(config, federation) if config.protects_records else None
  if not _knows_cohorts(config):
    cohort_sizes.check(config, num_clients)
  task, model, params = start(config, federation, random)
  params, apply = audits.beside(config, params, model.apply)
  kept = getattr(config.algorithm, "kept", None)
  if kept is not None:
    with within("algorithm"):
      check_parts(params, kept)
  mechanism = distributed.mechanism(config, trees.size(params))
  promised = (
    privacy.make_promise(config, plan, reported, num_clients, mechanism)
    if silos is None
    else records.promise(config, federation, silos)
  )
  federation, audited = audit.insert(
    config, federation, plan, promised, mechanism, params, num_clients
  )
  fed = FedRun(
    config=config,
    plan=plan,
    guarantee=privacy.add_notes(config, promised, federation.dataset),
    params=params,
    apply=apply,
    random=random,
    federation=federation,
    num_clients=num_clients,
    work=federated.LocalWork(**dataclasses.asdict(config.local)),
    test=test,
    task=task,
    audited=audited,
    mechanism=mechanism,
    silos=silos,
  )
  return fed._replace(algorithm=make_algorithm(fed))


def start(config: FedConfig, federation: Federation, random: RunKeys) -> Any:
  """Returns (the task, the model, its initial parameters without those of canaries)."""
  task, model, params = build_central.start(
    loading.central(config), federation.dataset, random
  )
  # A client's examples have no keys, so the loss would silently make no draws, as in evaluation.
  if task.keyed:
    raise UserError(
      "draws random numbers in training (dropout), for which clients have no keys; must be a "
      "model without, or one of launch.train",
      field="model.name",
      value=config.model.name,
    )
  return task, model, params


class Federated(Experiment[FedConfig]):
  """One run of a `FedConfig`, whose steps are rounds: one model, its data with many clients."""

  over_processes = True
  plans = True
  step_is = "round"

  def check(self) -> None:
    check(self.config)
    # What an audit leaves open is decided now, and stands in config.json.
    self.config = audit.resolve(self.config)

  def data(self) -> Any:
    return load_data(self.config, features=False)

  def with_features(self, data: Any) -> Any:
    return with_features(self.config, data)

  def data_key(self) -> Any:
    held = to_dict(self.config)
    return [held[name] for name in ("data", "model", "partition")]

  @property
  def num_steps(self) -> int:
    return self.config.num_rounds

  def same(self) -> dict[str, str]:
    # The digest covers only the computation. Checkpoints also depend on where client state is kept.
    digest = workdir.config_digest(self.config, ELSEWHERE)
    return {"config": digest, "client_state": self.config.client_state}

  def train(self, data: Any, keys: RunKeys) -> Story:
    return single(phase(assemble_loaded(self.config, data, keys)))

  def line(self, result: dict[str, Any]) -> str:
    reached = [
      f"{float(target):.0%} in {rounds}"
      for target, rounds in result["rounds_to_accuracy"].items()
      if rounds is not None
    ]
    return (
      f"{result['dataset']} {result['model']} {result['method']}, {result['num_clients']} "
      f"clients: {writers.headline(result)}, {guarantee.summary(result)}"
      f"{secure_sums.in_words(result)}, {result['num_steps']} rounds{writers.took(result)}"
      f"{records.in_words(result)}{client_scores.in_words(result)}"
      f"{'; ' + ', '.join(reached) if reached else ''}"
    )


def phase(fed: FedRun) -> Phase:
  """Returns the only phase of a federated run."""
  config = fed.config
  target = config.stop_at_accuracy
  if target is not None:
    needs_classes(fed.federation, "stop_at_accuracy", target)
  total = config.num_rounds
  by_client = ClientScores(fed)
  write_inputs = build_central.inputs_writer(config.data, config.model, fed.test)

  def write(folder: pathlib.Path, state: Any) -> None:
    write_inputs(folder)
    by_client.write(folder, state)

  def evaluate(state: Any) -> dict[str, float]:
    of_server = fed.task.evaluate(fed.apply, params_of(state), fed.test)
    return of_server | by_client.row(state)

  def program() -> step_program.StepProgram:
    known = ("auto", "vmap", "shard_map")
    common.only(config, "execution", known, " for a machine that is not here")
    state = fed.algorithm.init(fed.params, fed.federation.num_clients)
    drawn = fed.algorithm.cohorts(fed.federation, fed.work, rng=fed.random.sampler)
    for cohort in fed.audited.mark(drawn):
      try:
        fed.algorithm.round(state, cohort)
      except step_program.Reached as reached:
        size = trees.size(fed.audited.of_model(fed.params))
        return reached.program._replace(num_parameters=size)
    raise UserError("has no client in any of its cohorts", field="privacy.sampler")

  return Phase(
    num_steps=total,
    init=lambda: fed.algorithm.init(fed.params, fed.federation.num_clients),
    step=fed.algorithm.round,
    draws=lambda start: fed.audited.mark(
      fed.algorithm.cohorts(fed.federation, fed.work, rng=fed.random.sampler, start=start),
    ),
    released=lambda state: fed.audited.of_model(params_of(state)),
    evaluate=evaluate,
    write=write,
    guarantee=fed.guarantee,
    row_at=functools.partial(every, config.eval_every, total),
    observe=lambda state, info, step: (
      facts.observe(fed, state, info) | by_client.hidden_row(state)
    ),
    arrivals=facts.arrivals if shows_data(config) else None,
    unit="clients",
    enough=lambda row: target is not None and row["test_accuracy"] >= target,
    save_every=config.checkpoint_every,
    memory=functools.partial(client_states.Memory, on_disk=config.client_state == "disk"),
    name="rounds",
    steps_are="communication rounds",
    program=program,
    planned=lambda: facts.planned_facts(fed),
    describe=lambda state, stated, rows: (
      facts.of(fed, state, rows, stated["epsilon"]) | by_client.facts(state)
    ),
  )
