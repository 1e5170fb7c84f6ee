"""One training run from start to result.json: resumable, interruptible, never over budget.

Order of things, so that nothing is lost or spent twice: metrics of step k are written
before the checkpoint of step k; the checkpoint holds the ledger of the k steps that it
contains; a resumed run repeats later steps with the same batches and the same noise, so
it releases what the interrupted one would have released.
"""

from __future__ import annotations

import math
import pathlib
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

from dpjax import data as data_lib
from dpjax import names, noise, training, trees
from dpjax.accounting import Budget, BudgetExceeded, Ledger, delta_warning
from dpjax.runs.central import audit
from dpjax.runs.central import build
from dpjax.runs import checkpoint
from dpjax.runs import provenance
from dpjax.runs import release
from dpjax.runs import report
from dpjax.runs import streams
from dpjax.runs import user_code
from dpjax.runs import writers
from dpjax.runs.checkpoint import Checkpoints
from dpjax.runs.central.config import TrainConfig, to_dict
from dpjax.training import TrainState, eval_params
from dpjax.validate import UserError

CONFIG = "config.json"


class Interrupted(Exception):
  """The run was asked to stop; its state is saved."""

  def __init__(self, signum: int, step: int):
    super().__init__(f"stopped at step {step} and saved; run the same command to go on")
    self.signum = signum


@contextmanager
def signals() -> Iterator[list[int]]:
  """Collects SIGINT and SIGTERM instead of dying in the middle of a step."""
  received: list[int] = []
  previous = {}
  for signum in (signal.SIGINT, signal.SIGTERM):
    try:
      previous[signum] = signal.signal(signum, lambda s, _: received.append(s))
    except ValueError:  # not in the main thread: the owner of that thread handles them
      continue
  try:
    yield received
  finally:
    for signum, handler in previous.items():
      signal.signal(signum, handler)


def _differences(old: Any, new: Any, prefix: str = "config") -> Iterator[str]:
  if isinstance(old, dict) and isinstance(new, dict):
    for name in sorted({*old, *new}):
      yield from _differences(old.get(name), new.get(name), f"{prefix}.{name}")
  elif old != new:
    yield f"{prefix}: {old!r} there, {new!r} now"


def claim_workdir(workdir: pathlib.Path, config: Any) -> None:
  """Makes the directory this run's own, or raises if it holds another config's run."""
  wanted = writers.plain(to_dict(config))
  path = workdir / CONFIG
  if path.exists():
    differences = list(_differences(writers.read_json(path), wanted))
    if differences:
      raise UserError(
        f"workdir={workdir}: holds a run of another config ({differences[0]}); choose "
        "another directory, nothing was changed"
      )
  elif workdir.exists() and (not workdir.is_dir() or any(workdir.iterdir())):
    raise UserError(f"workdir={workdir}: must be a new, an empty or a run's own directory")
  else:
    writers.write_json(path, wanted)


@contextmanager
def given_back(workdir: pathlib.Path, *, fresh: bool) -> Iterator[None]:
  """Empties a folder that a run has claimed if it is refused before its first step.

  The setting that is mended makes another config, which the folder would otherwise refuse.

  Args:
    fresh: the folder was claimed by this very process, and the run is no release: the keys
      of a release are never drawn twice for one folder.
  """
  try:
    yield
  except UserError:
    if fresh and not checkpoint.newest(workdir) and not writers.read_metrics(workdir):
      for name in ("checkpoints", writers.EVENTS):
        shutil.rmtree(workdir / name, ignore_errors=True)
      for name in (writers.METRICS, writers.LOCK, CONFIG):
        (workdir / name).unlink(missing_ok=True)
    raise


def within_budget(ledger: Ledger, budget: Budget, **how: Any) -> None:
  """`Ledger.check`, whose error names the field of the config."""
  try:
    ledger.check(budget, **how)
  except BudgetExceeded as error:
    told = str(error).removeprefix("epsilon=")
    raise BudgetExceeded(f"privacy.epsilon_budget={told}") from error


def _check_budget(run: build.Run, config: TrainConfig, ledger: Ledger) -> None:
  """Refuses before the first step what would overspend at the last."""
  budget = config.privacy.epsilon_budget
  if budget is None or config.privacy.method not in build.PRIVATE_METHODS:
    return
  within_budget(
    ledger,
    Budget(epsilon=budget, delta=run.plan.accounted_delta(config.privacy.delta)),
    proposed=run.plan.remaining_event(ledger.num_steps),
    neighboring_relation=run.plan.neighboring_relation,
    accountant=run.plan.accountant,
  )


class _Loop:
  """The state of a running loop; one object so that each phase stays a short method."""

  def __init__(
    self, config: TrainConfig, run: build.Run, workdir: pathlib.Path, data: bytes
  ):
    self.config, self.run, self.workdir, self.data = config, run, workdir, data
    self.checkpoints = Checkpoints(workdir)
    self.state: TrainState = run.algorithm.init(run.params)
    self.ledger, self.seconds = Ledger(), 0.0
    self.key_id = _key_name(config, run)
    step = self.checkpoints.latest_step()
    if step is not None:
      self.state, meta = self.checkpoints.restore(self.state)
      streams.check_data(meta, data, name=config.data.name, workdir=workdir)
      self.ledger, self.seconds = Ledger.from_json(meta["ledger"]), meta["seconds"]
    else:  # keys and data must be remembered before anything is computed with them
      self.step = 0
      self.started = time.monotonic()
      self.save()
    self.step = int(step or 0)
    if self.ledger.num_steps != self.step:
      raise UserError(
        f"checkpoint={self.step}: its ledger holds {self.ledger.num_steps} steps; it cannot "
        "be trusted"
      )
    _check_budget(run, config, self.ledger)
    self.metrics = writers.MetricsWriter(workdir, resume_step=self.step or None)
    self.started = time.monotonic() - self.seconds
    # Now, so that what cannot be accounted at the end is refused at the beginning.
    self.final_epsilon = self._epsilon_after(run.plan.num_steps)

  def _epsilon_after(self, step: int) -> float:
    return float(self.run.plan.epsilon_curve([step])[0])

  def epsilon(self) -> float:
    """Of the steps so far, when it is asked for: a point of the curve costs as much as the
    accounting of a whole run."""
    last = self.step == self.run.plan.num_steps
    return self.final_epsilon if last else self._epsilon_after(self.step)

  def is_evaluated(self) -> bool:
    """Whether this step is one that is evaluated: each `eval_every`, and the last."""
    return not self.step % self.config.eval_every or self.step == self.run.plan.num_steps

  def charge(self) -> None:
    self.ledger = self.ledger.charge(
      self.run.plan.step_event(self.step),
      l2_clip_norm=self.run.plan.l2_bound,
      noise_key_id=self.key_id,
      first_step=self.step,
    )
    self.step += 1

  def evaluate(self) -> dict[str, float]:
    return self.run.task.evaluate(self.run.apply, eval_params(self.state), self.run.test)

  def record(self, info: Any) -> dict[str, float]:
    scores = self.evaluate()
    row = {
      "test_accuracy": scores["accuracy"],
      "test_loss": scores["loss"],
      "epsilon": self.epsilon(),
      "learning_rate": float(np.asarray(self.run.schedule(self.step - 1))),
    }
    scale = training.clip_scale(self.state)
    if scale is not None:  # public, or an output of the mechanism: no diagnostic
      row["l2_clip_norm"] = self.run.plan.l2_bound * scale
    if self.config.diagnostics and not self.config.release:
      row |= {f"not_private/{name}": float(value) for name, value in info._asdict().items()}
    self.metrics.write(self.step, row)
    return row

  def save(self) -> None:
    self.seconds = time.monotonic() - self.started
    meta = {
      "ledger": self.ledger.to_json(),
      "seconds": self.seconds,
      "seed": self.config.seed,
      **streams.to_meta(self.data),
    }
    if self.config.release:
      meta |= release.to_meta(self.run.random)
    self.checkpoints.save(self.step, self.state, meta)

  def close(self) -> None:
    self.metrics.close()
    self.checkpoints.close()


def _key_name(config: TrainConfig, run: build.Run) -> str:
  """What the ledger calls the noise key: nothing that follows from the data."""
  if config.release:
    return noise.key_id(run.random.noise)
  return streams.ledger_name(build.config_digest(config))


def _fit(loop: _Loop, received: list[int]) -> None:
  """Runs the steps that are left."""
  config, run = loop.config, loop.run
  step_fn = jax.jit(run.algorithm.step, donate_argnums=0)
  total = run.plan.num_steps
  bar = writers.progress(total, loop.step, "train")
  shown: dict[str, float] = {}
  train = data_lib.resident(run.train)
  batches = run.plan.batches(train, rng=run.random.sampler, start=loop.step)
  for number, batch in enumerate(batches, start=1):
    loop.state, info = step_fn(loop.state, batch)
    if number % run.plan.slices:  # the step is not complete: nothing is released yet
      continue
    loop.charge()
    if loop.is_evaluated():
      row = loop.record(info)
      shown = {"accuracy": row["test_accuracy"], "epsilon": row["epsilon"]}
    if loop.step % config.checkpoint_every == 0 or loop.step == total or received:
      loop.save()
    bar.update(1, **shown)
    if received and loop.step < total:
      bar.close()
      raise Interrupted(received[0], loop.step)
  bar.close()


def _charged(loop: _Loop) -> float:
  """Epsilon of the charges themselves, not of what the plan meant to run."""
  plan = loop.run.plan
  return loop.ledger.epsilon(
    plan.accounted_delta(plan.delta),
    neighboring_relation=plan.neighboring_relation,
    accountant=plan.accountant,
  )


def _privacy_facts(loop: _Loop) -> dict[str, Any]:
  """What is promised for what ran, by the ledger."""
  plan = loop.run.plan
  private = plan.is_private and math.isfinite(loop.final_epsilon)
  return {
    "epsilon": _charged(loop) if private else None,
    "delta": plan.delta if private else None,
    "neighboring_relation": str(plan.neighboring_relation) if private else None,
    "unit": getattr(plan.sampler, "unit", "example") if private else None,
    "epsilon_kind": user_code.kind(plan.sampler) if private else "none",
    "accountant": plan.accountant if private else None,
    "noise_multiplier": plan.noise_multiplier,
    "l2_clip_norm": plan.l2_clip_norm,
    **_clipping_facts(loop),
    "sampler": repr(plan.sampler),
    "normalize_by": plan.normalize_by,
    "privacy_statement": _statement(loop),
    "release": loop.config.release,
    "ledger": loop.ledger.to_json(),
  }


def _clipping_facts(loop: _Loop) -> dict[str, Any]:
  """How gradients were clipped. The last clip norm is public or an output of the mechanism."""
  config, plan = loop.config, loop.run.plan
  scale = training.clip_scale(loop.state)
  temperature = loop.run.sgld_temperature
  return {
    "clipping": config.privacy.clipping if config.privacy.method != "sgd" else None,
    **({} if scale is None else {"final_l2_clip_norm": plan.l2_bound * scale}),
    **({} if temperature is None else {"sgld_temperature": temperature}),
  }


def _statement(loop: _Loop) -> str:
  run = loop.run
  text = run.plan.statement(len(run.train), loop.ledger.num_steps)
  return f"{text}\n\n{release.statement(run.plan)}" if loop.config.release else text


def _audit_facts(loop: _Loop, epsilon: float | None) -> dict[str, Any]:
  run = loop.run
  if run.canaries is None:
    return {}
  return audit.facts(
    loop.config,
    loss_fn=run.task.loss(run.apply),  # without augmentation
    before=run.params,
    after=eval_params(loop.state),
    canaries=run.canaries,
    epsilon=epsilon,
  )


def _result(loop: _Loop) -> dict[str, Any]:
  config, scores = loop.config, loop.evaluate()
  facts = _privacy_facts(loop)
  audit_facts = _audit_facts(loop, facts["epsilon"])
  return {
    "task": loop.run.task.name,
    "dataset": config.data.name,
    "model": config.model.name,
    "method": config.privacy.method,
    **{name: facts.pop(name) for name in ("epsilon", "delta", "neighboring_relation")},
    **{name: facts.pop(name) for name in ("unit", "epsilon_kind")},
    **audit_facts,
    "test_accuracy": scores["accuracy"],
    **{f"test_{name}": value for name, value in scores.items() if name != "accuracy"},
    "num_steps": loop.ledger.num_steps,
    "seed": config.seed,
    "num_parameters": trees.size(loop.run.params),
    "params_sha256": trees.sha256(eval_params(loop.state)),
    "wall_seconds": round(time.monotonic() - loop.started, 3),
    "device": provenance.device(),
    "versions": provenance.versions(),
    "user_code": names.sources(to_dict(config)),
    **facts,
  }


def save_params(workdir: pathlib.Path, params: Any) -> None:
  """The released model alone, without the noise key: params.npz, one array per path."""
  leaves = jax.tree_util.tree_leaves_with_path(params)
  arrays: dict[str, Any] = {
    jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf)
    for path, leaf in leaves
  }
  np.savez(workdir / "params.npz", **arrays)


def train(
  config: TrainConfig, workdir: pathlib.Path | str, *, data: tuple[Any, Any] | None = None
) -> dict[str, Any]:
  """Trains, or goes on training, and returns the content of result.json.

  Args:
    config: the whole run; equal configs and data give equal parameters, bit for bit,
      on the same machine and software.
    workdir: new, empty, or of an earlier (unfinished or finished) run of the same config on
      the same data.
    data: `(train, test)` as `build.load_data` returns them, to share between runs.

  Returns:
    result.json's content. Also written: config.json, metrics.jsonl, TensorBoard events,
    report.png and .csv, params.npz (the model to release), checkpoints (secret).

  Raises:
    UserError: a wrong config, missing data, a workdir of another config or of other data,
      one where another process is at work, an overspent budget; in each case nothing is
      overwritten.
    Interrupted: SIGINT or SIGTERM arrived; the state is saved.
  """
  workdir = pathlib.Path(workdir)
  build.check(config)
  meta = known(config, workdir)
  if (workdir / writers.RESULT).exists():
    if streams.remembers(meta):
      train, _ = build.load_arrays(config) if data is None else data
      _check_data(config, workdir, meta, data_lib.digest(train))
    return writers.read_json(workdir / writers.RESULT)
  data = build.load_data(config) if data is None else data
  digest = data_lib.digest(data[0])
  _check_data(config, workdir, meta, digest)
  derive = lambda: build.streams(config, digest)
  random = release.streams(config, meta) if config.release else derive()
  run = build.build(config, data, random)
  if meta is None:
    _check_budget(run, config, Ledger())
  fresh = not (workdir / CONFIG).exists() and not config.release
  claim_workdir(workdir, config)
  _warn(config, run)
  with writers.alone(workdir / CONFIG), given_back(workdir, fresh=fresh):
    return _train(config, run, workdir, digest)


def known(config: Any, workdir: pathlib.Path) -> dict[str, Any] | None:
  """The meta data of the newest checkpoint of this very config; None: there is none yet.

  Raises:
    UserError: the directory holds another config's run, or a checkpoint that cannot be read.
  """
  if not ((workdir / writers.RESULT).exists() or (workdir / CONFIG).exists()):
    return None
  claim_workdir(workdir, config)  # before its checkpoints are looked into
  return checkpoint.meta_of(workdir)


def _check_data(config: TrainConfig, workdir: pathlib.Path, meta: Any, data: bytes) -> None:
  streams.check_data(meta, data, name=config.data.name, workdir=workdir)


def _train(
  config: TrainConfig, run: build.Run, workdir: pathlib.Path, data: bytes
) -> dict[str, Any]:
  loop = _Loop(config, run, workdir, data)
  try:
    with signals() as received:
      _fit(loop, received)
    result = _result(loop)
  finally:
    loop.close()
  save_params(workdir, eval_params(loop.state))
  writers.write_result(workdir, result)
  report.train_report(workdir)
  return result


def _warn(config: TrainConfig, run: build.Run) -> None:
  warning = delta_warning(config.privacy.delta, len(run.train))
  if warning and config.privacy.method in build.PRIVATE_METHODS:
    writers.warn(warning)
