"""A run of relevance on zeros, for --dry_run: what it guarantees, and how long it takes."""

from __future__ import annotations

import dataclasses
import math
import pathlib
import time
from typing import Any

import numpy as np

from dpjax.accounting import Ledger
from dpjax.data import Dataset
from dpjax.experiments.config.choices import name_of
from dpjax.experiments.kinds.relevance import build
from dpjax.experiments.run import dry_run, guarantee
from dpjax.experiments.run import workdir as owner
from dpjax.relevance import pipeline
from dpjax.relevance.rigorous_method import check_public
from dpjax.relevance.train import Steps, carry_out


def report(run: build.Relevance, workdir: pathlib.Path | str) -> str:
  """Returns the plan of a run as text, one line for each fact."""
  run.check()
  folder = pathlib.Path(workdir)
  # The folder is checked before the data are read, as in a run.
  owner.recall_for(folder, run.config)
  shared = run.data()
  state = dry_run.state_of(run, shared, folder)
  plan = on_zeros(run, shared)
  lines = {
    "privacy": guarantee.summary(plan.facts),
    "steps": str(plan.num_steps),
    "time": f"about {plan.seconds / 60:.2g} minutes (estimate, from a few steps on zeros)",
    "memory": dry_run.memory(),
    "workdir": f"{workdir}: {state}",
  }
  return dry_run.align(lines)


def on_zeros(run: build.Relevance, shared: dict[Any, Any]) -> dry_run.Planned:
  """Returns the guarantee and the estimated time of a run. The time leaves out the attacks of an
  audit.

  Each training takes only a few steps. Everything else runs in full.

  Args:
    shared: result of `Relevance.data`, after its check.

  Raises:
    UserError: the run would be refused before its first step.
  """
  config = run.config
  began = time.monotonic()
  counted = []
  zeros = {
    key: tuple(dry_run.blank(part, part.x.shape[1:]) for part in held)
    for key, held in shared.items()
    # `shared` also holds other things than data sets, such as compiled steps.
    if isinstance(held, tuple) and all(isinstance(part, Dataset) for part in held)
  }

  def trainer(steps: Steps) -> Any:
    phase = build.phase(config, steps)
    started = time.monotonic()
    timing, state = dry_run.time_steps(phase)
    counted.append(timing.whole(phase) - (time.monotonic() - started))
    return state[0]

  loaded = build.load_data(config, zeros)
  run.check()
  run.check_data(zeros)
  job = build.make_job(config, *loaded, zeros, run.new_keys())
  # Public data become ones: equal zeros would be refused as copies of private records.
  if job.public is not None:
    train, _ = build.load_data(config, shared)
    check_public(train, build.load_public(config, shared))
    ones = dataclasses.replace(job.public, x=np.ones_like(job.public.x))
    job = dataclasses.replace(job, public=ones)
  outcome = build.as_claim(
    config, carry_out(pipeline.story(name_of(config, "method"), job), trainer)
  )
  stated = build.guarantee(outcome.privacy, len(loaded[0]))
  facts = stated.facts(Ledger(), stated.curve(outcome.num_steps))
  seconds = time.monotonic() - began + math.fsum(counted)
  return dry_run.Planned(facts, seconds, outcome.num_steps)
