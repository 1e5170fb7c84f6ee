"""One federated run from start to result.json: resumable, interruptible, never over budget.

As `run.train`, with rounds for steps and users for examples: metrics of round k are written
before the checkpoint of round k, which holds parameters, server optimizer, control variates,
noise key and the ledger of the k rounds; a resumed run repeats later rounds exactly.

On several processes (`federated.processes`) all call `federate` with the same config: each
runs its share of every cohort, process 0 alone evaluates and holds the files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax

from dpjax import data as data_lib
from dpjax import federated, names, noise, transforms, trees
from dpjax.accounting import Budget, Ledger, delta_warning
from dpjax.data import partition
from dpjax.runs.federated import build
from dpjax.runs import provenance
from dpjax.runs import release
from dpjax.runs import report
from dpjax.runs.central import run
from dpjax.runs import shared
from dpjax.runs import streams
from dpjax.runs import writers
from dpjax.runs.federated.build import FedRun
from dpjax.runs.federated.config import FedConfig
from dpjax.federated import processes
from dpjax.validate import UserError

Interrupted = run.Interrupted


class _Loop:
  """The state of a running federation; one object so that each phase is a short method."""

  def __init__(
    self,
    config: FedConfig,
    fed: FedRun,
    workdir: pathlib.Path,
    on_save: Callable,
    data: bytes,
  ):
    self.config, self.fed, self.on_save, self.data = config, fed, on_save, data
    self.checkpoints = shared.Checkpoints(workdir)
    self.state: Any = fed.algorithm.init(fed.params, fed.federation.num_clients)
    self.ledger, self.seconds, self.round = Ledger(), 0.0, 0
    self.reached = False  # config.stop_at_accuracy
    self.key_id = _key_name(config, fed)
    self.started = time.monotonic()
    if self.checkpoints.latest_step() is not None:
      self._resume(workdir)
    else:  # keys and data must be remembered before anything is computed with them
      self.save()
    _check_budget(config, fed, self.ledger)
    self.metrics = shared.metrics(workdir, resume_step=self.round or None)
    self.started = time.monotonic() - self.seconds
    # Now, so that what cannot be accounted at the end is refused at the beginning.
    self.final_epsilon: float = processes.on_first(
      lambda: self._epsilon_after(config.num_rounds)
    )

  def _epsilon_after(self, round: int) -> float:
    return float(self.fed.promise.curve([round])[0])

  def epsilon(self) -> float:
    """Of the rounds so far, when it is asked for: a point of the curve costs as much as the
    accounting of a whole run."""
    last = self.round == self.config.num_rounds
    return self.final_epsilon if last else self._epsilon_after(self.round)

  def is_evaluated(self) -> bool:
    """Whether this round is one that is evaluated: each `eval_every`, and the last."""
    return not self.round % self.config.eval_every or self.round == self.config.num_rounds

  def _resume(self, workdir: pathlib.Path) -> None:
    self.state, meta = self.checkpoints.restore(self.state)
    streams.check_data(meta, self.data, name=self.config.data.name, workdir=workdir)
    self.ledger, self.seconds = Ledger.from_json(meta["ledger"]), meta["seconds"]
    self.reached = meta.get("reached", False)
    self.round = int(self.checkpoints.latest_step() or 0)
    if self.ledger.num_steps != self.round:
      raise UserError(
        f"checkpoint={self.round}: its ledger holds {self.ledger.num_steps} rounds; it cannot "
        "be trusted"
      )
    self.on_save(self.round)

  def charge(self) -> None:
    """Also for a round without clients: its noise was released."""
    self.ledger = self.ledger.charge(
      self.fed.promise.step_event(self.round),
      l2_clip_norm=_clip_norm(self.config, self.fed),
      noise_key_id=self.key_id,
      first_step=self.round,
    )
    self.round += 1

  def evaluate(self) -> dict[str, float]:
    params = federated.params_of(self.state)
    return self.fed.task.evaluate(self.fed.apply, params, self.fed.test)

  def _measured(self) -> dict[str, float]:
    scores = self.evaluate()
    row = {"test_accuracy": scores["accuracy"], "test_loss": scores["loss"]}
    return row if self.fed.promise.kind == "none" else row | {"epsilon": self.epsilon()}

  def record(self, info: federated.RoundInfo) -> dict[str, float]:
    row = processes.on_first(self._measured)
    row |= _changing_clip_norm(self, "l2_clip_norm")
    if self.config.diagnostics and not self.config.release:
      shown = {**info._asdict()}
      del shown["clients"]
      row |= {f"not_private/{name}": float(value) for name, value in shown.items()}
    self.metrics.write(self.round, row)
    target = self.config.stop_at_accuracy
    self.reached = target is not None and row["test_accuracy"] >= target
    return row

  def save(self) -> None:
    self.seconds = time.monotonic() - self.started
    meta = {
      "ledger": self.ledger.to_json(),
      "seconds": self.seconds,
      "reached": self.reached,
      **streams.to_meta(self.data),
    }
    if self.config.release:
      meta |= release.to_meta(self.fed.random)
    self.checkpoints.save(self.round, self.state, meta)
    self.on_save(self.round)

  def close(self) -> None:
    self.metrics.close()
    self.checkpoints.close()


def _key_name(config: FedConfig, fed: FedRun) -> str:
  """What the ledger calls the noise key: nothing that follows from the data."""
  if config.release:
    return noise.key_id(fed.random.noise)
  return streams.ledger_name(build.digest(config))


def _clip_norm(config: FedConfig, fed: FedRun) -> float:
  local = config.privacy.method == "local"
  return config.privacy.l2_clip_norm if local else fed.plan.l2_bound


def _changing_clip_norm(loop: _Loop, name: str) -> dict[str, float]:
  """{name: that of the next round} with adaptive clipping: an output of the mechanism."""
  scale = transforms.clip_scale(getattr(loop.state, "aggregator", None))
  return {} if scale is None else {name: loop.fed.plan.l2_bound * float(scale)}


def _check_budget(config: FedConfig, fed: FedRun, ledger: Ledger) -> None:
  """Refuses before the first round what would overspend at the last."""
  budget = config.privacy.epsilon_budget
  if budget is None or fed.promise.kind == "none":
    return
  run.within_budget(
    ledger,
    Budget(epsilon=budget, delta=_accounted_delta(config, fed)),
    proposed=fed.promise.remaining_event(ledger.num_steps),
    neighboring_relation=fed.promise.relation,
    accountant=fed.plan.accountant,
  )


def _accounted_delta(config: FedConfig, fed: FedRun) -> float:
  if config.privacy.method == "local":
    return fed.promise.delta
  return fed.plan.accounted_delta(fed.promise.delta)


def _fit(loop: _Loop, received: list[int]) -> None:
  """Runs the rounds that are left."""
  config, fed, total = loop.config, loop.fed, loop.config.num_rounds
  bar, shown = shared.progress(total, loop.round, "rounds"), {}
  rng = fed.random.sampler
  if loop.reached:  # stopped here before, but killed before its result was written
    return bar.close()
  for cohort in federated.cohorts(
    fed.plan, fed.federation, fed.work, rng=rng, start=loop.round
  ):
    loop.state, info = fed.algorithm.round(loop.state, cohort)
    loop.charge()
    if loop.is_evaluated():
      row = loop.record(info)
      names = {"accuracy": "test_accuracy", "epsilon": "epsilon"}
      shown = {name: row[key] for name, key in names.items() if key in row}
    stop = processes.largest(received[0] if received else 0)  # whoever was told
    last = loop.round == total or loop.reached
    if loop.round % config.checkpoint_every == 0 or last or stop:
      loop.save()
    bar.update(1, **shown)
    if last:
      break
    if stop:
      bar.close()
      raise Interrupted(stop, loop.round)
  bar.close()


def _ledger_epsilon(loop: _Loop) -> float:
  """Epsilon of the charges themselves, not of what was meant to run."""
  fed = loop.fed
  return loop.ledger.epsilon(
    _accounted_delta(loop.config, fed),
    neighboring_relation=fed.promise.relation,
    accountant="pld" if loop.config.privacy.method == "local" else fed.plan.accountant,
  )


def _epsilon_facts(loop: _Loop) -> dict[str, Any]:
  promise = loop.fed.promise
  names = ("epsilon", "delta", "neighboring_relation", "unit")
  if promise.kind == "none" or not math.isfinite(loop.final_epsilon):
    return dict.fromkeys(names) | {"epsilon_kind": "none"}
  facts = {"delta": promise.delta, "neighboring_relation": promise.relation, "unit": "user"}
  spent = _ledger_epsilon(loop)
  if promise.kind == "simulated":
    return facts | {
      "epsilon": loop.final_epsilon,
      "epsilon_kind": "simulated",
      "epsilon_of_this_run": spent,
    }
  return facts | {"epsilon": spent, "epsilon_kind": promise.kind}


def rounds_to(rows: list[dict[str, Any]], targets: tuple[float, ...]) -> dict[str, Any]:
  """The first evaluated round whose test accuracy reaches each target, or None.

  >>> rounds_to([{"step": 1, "test_accuracy": 0.5}, {"step": 2, "test_accuracy": 0.98}],
  ...           (0.97, 0.99))
  {'0.97': 2, '0.99': None}
  """
  first = lambda target: (r["step"] for r in rows if r["test_accuracy"] >= target)
  return {f"{target:g}": next(first(target), None) for target in targets}


def _heterogeneity(config: FedConfig, fed: FedRun) -> dict[str, float]:
  """An exact function of the users' labels: named as such where users are promised privacy,
  and left out with the other diagnostics."""
  public = config.privacy.method == "none"
  if not public and (config.release or not config.diagnostics):
    return {}
  name = "heterogeneity" if public else "not_private/heterogeneity"
  return {name: partition.heterogeneity(fed.federation.label_histograms())}


def _noise_facts(config: FedConfig, fed: FedRun) -> dict[str, float]:
  """`noise_multiplier` is of the noise that the epsilon is for; clients' own beside it."""
  local = build.local_noise(config)
  if local is None:
    return {"noise_multiplier": fed.plan.noise_multiplier}
  charged = local if config.privacy.method == "local" else fed.plan.noise_multiplier
  return {"noise_multiplier": charged, "local_noise_multiplier": local}


def _statement(loop: _Loop) -> str:
  text = loop.fed.promise.statement(loop.ledger.num_steps)
  return f"{text}\n\n{release.statement(loop.fed.plan)}" if loop.config.release else text


def _result(loop: _Loop, workdir: pathlib.Path) -> dict[str, Any]:
  config, fed, scores = loop.config, loop.fed, loop.evaluate()
  facts = _epsilon_facts(loop)
  prefixes = {"none": "", "central": "dp_", "dp_ftrl": "dp_ftrl_"}
  method = prefixes.get(config.privacy.method, "ldp_")
  return {
    "task": fed.task.name,
    "dataset": config.data.name,
    "model": config.model.name,
    "method": f"{method}{config.algorithm.name}",
    **facts,
    "test_accuracy": scores["accuracy"],
    **{f"test_{name}": value for name, value in scores.items() if name != "accuracy"},
    "rounds_to_accuracy": rounds_to(writers.read_metrics(workdir), config.targets),
    "num_steps": loop.ledger.num_steps,  # rounds
    "num_clients": fed.federation.num_clients,
    "clients_per_round": config.clients_per_round,
    "partition": config.partition.name,
    **_heterogeneity(config, fed),
    "release": config.release,
    "seed": config.seed,
    "num_parameters": trees.size(fed.params),
    "params_sha256": trees.sha256(federated.params_of(loop.state)),
    "wall_seconds": round(time.monotonic() - loop.started, 3),
    "device": provenance.device(),
    "versions": provenance.versions(),
    "user_code": names.sources(dataclasses.asdict(config)),
    **_noise_facts(config, fed),
    "l2_clip_norm": _clip_norm(config, fed),
    **_changing_clip_norm(loop, "final_l2_clip_norm"),
    "sampler": repr(fed.plan.sampler),
    "privacy_statement": _statement(loop),
    "ledger": loop.ledger.to_json(),
  }


def federate(
  config: FedConfig,
  workdir: pathlib.Path | str,
  *,
  data: tuple[Any, Any] | None = None,
  on_save: Callable[[int], None] = lambda round: None,
) -> dict[str, Any]:
  """Trains over clients, or goes on training, and returns the content of result.json.

  Args:
    config: the whole run; equal configs and data give equal parameters, bit for bit, on the
      same machine, software and execution.
    workdir: new, empty, or of an earlier run of the same config on the same data.
    data: (a `Federation`, the test set), in place of what the config names.
    on_save: told each round that is saved, or resumed from.

  Returns:
    result.json's content. Also written: config.json, metrics.jsonl, TensorBoard events,
    report.png and .csv, params.npz, checkpoints (secret: they hold the noise key).

  Raises:
    UserError: a wrong config, missing data, a workdir of another config or of other data,
      one where another run is at work, an overspent budget, processes whose data differ;
      nothing is overwritten.
    Interrupted: SIGINT or SIGTERM arrived, in any of the processes; the state is saved.
    PeerLost: another process of this run is gone.
  """
  workdir = pathlib.Path(workdir)
  build.check(config)
  _check_processes(config)
  done = processes.on_first(lambda: _finished(config, workdir, data))
  if done is not None:
    return done
  data = build.load_data(config) if data is None else data
  digest = data_lib.digest(data[0])
  processes.same(data=digest.hex())  # compared by what follows from it, and never shown
  meta = processes.on_first(lambda: _of_these_data(config, workdir, digest))
  fed = build.build_run(config, data, _streams(config, meta, digest))
  if meta is None:
    _check_budget(config, fed, Ledger())
  fresh = processes.is_first() and not (workdir / run.CONFIG).exists()
  fresh = fresh and not config.release and jax.process_count() == 1
  processes.on_first(lambda: run.claim_workdir(workdir, config))
  if processes.is_first():
    _warn(config, fed)
  with contextlib.ExitStack() as held:
    processes.on_first(lambda: held.enter_context(writers.alone(workdir / run.CONFIG)))
    held.enter_context(run.given_back(workdir, fresh=fresh))
    return _federate(config, fed, workdir, on_save, digest)


def _of_these_data(
  config: FedConfig, workdir: pathlib.Path, data: bytes
) -> dict[str, Any] | None:
  """`run.known`, and UserError where it is of other data."""
  meta = run.known(config, workdir)
  streams.check_data(meta, data, name=config.data.name, workdir=workdir)
  return meta


def _streams(config: FedConfig, meta: dict[str, Any] | None, data: bytes) -> Any:
  if not config.release:
    return build.streams(config, data)
  return release.streams(config, meta, build.Streams)


def _check_processes(config: FedConfig) -> None:
  if config.release and jax.process_count() > 1:
    raise UserError(
      f"release=True: must be run by one process, not {jax.process_count()}: its keys leave "
      "no machine"
    )


def _federate(
  config: FedConfig, fed: FedRun, workdir: pathlib.Path, on_save: Callable, data: bytes
) -> dict[str, Any]:
  loop = _Loop(config, fed, workdir, on_save, data)
  try:
    with run.signals() as received:
      _fit(loop, received)
    result = processes.on_first(lambda: _result(loop, workdir))
  finally:
    loop.close()
  processes.on_first(lambda: _write(loop, workdir, result))
  return result


def _finished(config: FedConfig, workdir: pathlib.Path, data: Any) -> dict[str, Any] | None:
  """The result of a run that is done; UserError if the directory is another run's."""
  meta = run.known(config, workdir)
  if not (workdir / writers.RESULT).exists():
    return None
  if streams.remembers(meta):
    federation, _ = build.load_arrays(config) if data is None else data
    digest = data_lib.digest(federation)
    streams.check_data(meta, digest, name=config.data.name, workdir=workdir)
  return writers.read_json(workdir / writers.RESULT)


def _write(loop: _Loop, workdir: pathlib.Path, result: dict[str, Any]) -> None:
  run.save_params(workdir, federated.params_of(loop.state))
  writers.write_result(workdir, result)
  report.train_report(workdir, steps="communication rounds")


def _warn(config: FedConfig, fed: FedRun) -> None:
  warning = delta_warning(config.privacy.delta, fed.federation.num_clients)
  if warning and fed.promise.kind != "none":
    writers.warn(warning.replace("num_examples", "num_clients"))
