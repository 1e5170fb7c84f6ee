"""Runs the methods that the RADP paper compares, and dpjax's own: Inputs in, Outcome out.

| method          | mode of proof                                                            |
| --------------- | ------------------------------------------------------------------------ |
| radp            | paper: claimed; rigorous: proved (replace_one), claimed if model1=public |
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
from dpjax.relevance.settings import MODES, Rigorous
from dpjax.types import Params
from dpjax.validate import UserError

METHODS: dict[str, Callable[[Inputs], train.Story]] = {
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
NAMES = ("radp", *METHODS)


def reads(method: str, mode: str, how: Rigorous) -> frozenset[str]:
  """Returns which of the parts "relevance_records" and "public" of an Inputs a method reads. `run`
  refuses a part that is not read.

  >>> sorted(reads("radp", "paper", Rigorous())), sorted(reads("dpsgd", "paper", Rigorous()))
  (['relevance_records'], [])
  """
  averages = method == "adlm" or (method, mode) == ("radp", "paper")
  public = (method, mode) == ("radp", "rigorous") and how.model1 == "public"
  names = {"relevance_records": averages, "public": public}
  return frozenset(name for name, is_read in names.items() if is_read)


def _refuse_unread(method: str, mode: str, job: Inputs) -> None:
  """Raises UserError for parts of the job that the method would not read, or cannot take."""
  read = reads(method, mode, job.rigorous)
  if job.relevance_records is not None:
    validate.integer_in(1, len(job.train), relevance_records=job.relevance_records)
    if "relevance_records" not in read:
      raise UserError(
        f"must be None for method={method!r} in mode={mode!r}: only 'adlm', and "
        "'radp' in mode='paper', average over fewer records than the training data "
        "hold",
        field="relevance_records",
        value=job.relevance_records,
      )
  if job.public is not None and "public" not in read:
    raise UserError(
      "must be None unless method='radp' in mode='rigorous' with "
      "rigorous.model1='public': nothing else reads it",
      field="public",
      value=job.public.name,
    )
  present = getattr(job.train, "present", None)
  if present is not None and not np.all(present):
    raise UserError(
      f"{np.count_nonzero(~np.asarray(present))} of its records are empty "
      "(present=False); every record is averaged over, noised and counted here: "
      "leave them out",
      field="train",
    )


def run(method: str, mode: str, job: Inputs) -> Outcome:
  """Runs one method, all its trainings without a stop; see `story`."""
  trainer = functools.partial(train.in_one_go, on_epoch=job.on_epoch)
  return train.carry_out(story(method, mode, job), trainer)


def story(method: str, mode: str, job: Inputs) -> Generator[train.Steps, Params, Outcome]:
  """Yields each training of one method, gets its last parameters, and returns the outcome.

  `mode` matters for "radp" only. Noise and sampled batches depend on the method, the settings and
  the records: see `Keys`.

  Raises:
    UserError: the method or the mode is unknown; the method does not read a part or a setting of
      the job; a value is out of range; a training record is empty; rigorous mode refuses a setting
      or the data. The message names what is wrong.
  """
  validate.one_of(NAMES, method=method)
  validate.one_of(MODES, mode=mode)
  validate.positive(epsilon=job.epsilon)
  _refuse_unread(method, mode, job)
  decay = job.training.weight_decay
  if decay and (method, mode) != ("radp", "rigorous"):
    raise UserError(
      f"must be 0 for method={method!r} in mode={mode!r}: only method='radp' in "
      "mode='rigorous' trains with it",
      field="weight_decay",
      value=decay,
    )
  if (method, mode) == ("radp", "rigorous"):
    return (yield from rigorous_method.radp_rigorous(job))
  # Noise must differ if any of these settings differs; see `Keys`.
  settings = (method, job.paper, job.adlm, job.size, job.relevance_records)
  play = claimed_methods.radp_paper if method == "radp" else METHODS[method]
  return (yield from play(job.bound(*settings)))
