"""Runs the methods that the RADP paper compares, and dpjax's own: Inputs in, Outcome out.

| method          | kind of its epsilon                                                      |
| --------------- | ------------------------------------------------------------------------ |
| radp            | claimed: as in the paper ("paper mode")                                  |
| radp_rigorous   | proved under replace_one; claimed if model1=public ("rigorous mode")     |
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

import functools
from collections.abc import Callable, Generator

import numpy as np

from dpjax import validate
from dpjax.relevance import claimed_methods, gradient_methods, rigorous_method, train
from dpjax.relevance.inputs import Inputs, Outcome
from dpjax.types import Params
from dpjax.validate import UserError

METHODS: dict[str, Callable[[Inputs], train.Story]] = {
  "radp": claimed_methods.radp_paper,
  "radp_rigorous": rigorous_method.radp_rigorous,
  "radp_dpsgd": gradient_methods.radp_dpsgd,
  "adlm": claimed_methods.adlm_method,
  "ilm": functools.partial(claimed_methods.adlm_method, with_relevance=False),
  "dpsgd": gradient_methods.dpsgd,
  "tempered": gradient_methods.tempered_sigmoids,
  "dp_adam": gradient_methods.dp_adam,
  "dpdligdo": gradient_methods.dpdligdo,
  "dp_sgld": gradient_methods.dp_sgld,
  "no_dp": claimed_methods.no_dp,
}
_AVERAGES = ("radp", "adlm")  # methods that read `relevance_records`
_RIGOROUS = "radp_rigorous"


def _refuse_unread(method: str, job: Inputs) -> None:
  """Raises UserError for parts of the job that the method would not read, or cannot take."""
  if job.relevance_records is not None:
    validate.integer_in(1, len(job.train), relevance_records=job.relevance_records)
    if method not in _AVERAGES:
      raise UserError(
        f"must be None for method={method!r}: only {' and '.join(map(repr, _AVERAGES))} average "
        "over fewer records than the training data hold",
        field="relevance_records",
        value=job.relevance_records,
      )
  public = method == _RIGOROUS and job.rigorous.model1 == "public"
  if job.public is not None and not public:
    raise UserError(
      f"must be None unless method={_RIGOROUS!r} with rigorous.model1='public': nothing else "
      "reads it",
      field="public",
      value=job.public.name,
    )
  decay = job.training.weight_decay
  if decay and method != _RIGOROUS:
    raise UserError(
      f"must be 0 for method={method!r}: only {_RIGOROUS!r} trains with it",
      field="weight_decay",
      value=decay,
    )
  present = getattr(job.train, "present", None)
  if present is not None and not np.all(present):
    raise UserError(
      f"{np.count_nonzero(~np.asarray(present))} of its records are empty "
      "(present=False); every record is averaged over, noised and counted here: "
      "leave them out",
      field="train",
    )


def run(method: str, job: Inputs) -> Outcome:
  """Runs one method, all its trainings without a stop; see `story`."""
  trainer = functools.partial(train.in_one_go, on_epoch=job.on_epoch)
  return train.carry_out(story(method, job), trainer)


def story(method: str, job: Inputs) -> Generator[train.Steps, Params, Outcome]:
  """Yields each training of one method, gets its last parameters, and returns the outcome.

  Noise and sampled batches depend on the method, the settings and the records: see `Keys`.

  Raises:
    UserError: the method is unknown; the method does not read a part or a setting of the job; a
      value is out of range; a training record is empty; `radp_rigorous` refuses a setting or the
      data. The message names what is wrong.
  """
  validate.one_of(METHODS, method=method)
  validate.positive(epsilon=job.epsilon)
  _refuse_unread(method, job)
  if method != _RIGOROUS:  # which binds its keys itself, stage by stage
    # Noise must differ if any of these settings differs; see `Keys`.
    settings = (method, job.paper, job.adlm, job.size, job.relevance_records)
    job = job.bound(*settings)
  return (yield from METHODS[method](job))
