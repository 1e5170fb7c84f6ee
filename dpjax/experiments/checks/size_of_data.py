"""Checks that plan, guarantee and all planned parts of result.json do not depend on the number of
records. Under add-or-remove-one this number is secret."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from dpjax import data
from dpjax.accounting.proved import NeighboringRelation
from dpjax.experiments.checks.subject import Row, Subject, not_applicable, row
from dpjax.experiments.kinds.central import build, facts
from dpjax.experiments.kinds.central.config import AuditConfig

_NAME = "number of records"


def _of_zeros(train: data.Dataset, count: int) -> data.Dataset:
  """Returns a data set of `count` records of zeros, since a plan must not depend on content."""
  # A broadcast row takes no memory for the copies.
  x = np.broadcast_to(
    np.zeros(train.x.shape[1:], train.x.dtype), (count, *train.x.shape[1:])
  )
  y = np.zeros((count, *train.y.shape[1:]), train.y.dtype)
  return dataclasses.replace(train, x=x, y=y, present=None)


def _built(subject: Subject, train: data.Dataset) -> dict[str, str]:
  """Returns name -> text of the parts of a run on `train`: plan, guarantee, planned result."""
  assert subject.config is not None and subject.run_keys is not None
  # The audit is left out, since its canaries remove or replace random records.
  config = dataclasses.replace(subject.config, audit=AuditConfig())
  run = build.assemble(config, (train, train), subject.run_keys(config))
  stated = run.guarantee
  return {
    "plan": repr(run.plan),
    "events": repr(stated.remaining_event(0)),
    "statement": stated.statement(config.num_steps),
    "number of records in the guarantee": repr(stated.num_records),
    "noise that the optimizer knows": repr(run.noise),
    "result.json": repr(facts.planned(config, run)),
  }


def size_of_data(subject: Subject) -> Row:
  """Tests that the run is built alike with one record less and with one record more.

  Otherwise the scale of the noise, for example, would reveal the number of records, and with it
  whether one record is present (arXiv 2605.15648).
  """
  if subject.config is None:
    return not_applicable(_NAME, "the plan is given, none is made of a config")
  relation = subject.plan.neighboring_relation
  if relation != NeighboringRelation.ADD_OR_REMOVE_ONE:
    return not_applicable(_NAME, f"is the same in neighbouring data sets under {relation}")
  count = len(subject.train)
  less = _built(subject, _of_zeros(subject.train, count - 1))
  more = _built(subject, _of_zeros(subject.train, count + 1))
  differ = [name for name in less if less[name] != more[name]]
  detail = ", ".join(differ) or "things that differ between a record less and a record more"
  return row(_NAME, len(differ), 0, detail)


CHECKS: tuple[Callable[[Subject], Row], ...] = (size_of_data,)
