"""Damaged data sets are taken, or refused in one line: a few of `tests.wrong_inputs`."""

import collections

import pytest

from dpjax.validate import UserError
from tests import wrong_files, wrong_inputs


@pytest.mark.parametrize("launcher", sorted(wrong_files.readers()))
def test_damaged_sets_are_taken_or_refused_in_one_line(launcher):
  count = 40 if launcher == "train" else 8
  verdicts = wrong_inputs.walk_data(launcher, count, seed=1)
  assert verdicts["refused"] and set(verdicts) <= {"accepted", "refused"}, verdicts


def test_what_is_no_line_is_seen():
  """A judge that lets everything pass would find nothing."""

  def refused(error):
    raise error

  cases = {
    "accepted": None,
    "refused": UserError("must be a", field="b", value=1),
    "traceback": ValueError("a"),
    "slow": wrong_files.Hang(),
  }
  verdicts = collections.Counter()
  for error in cases.values():
    call = (lambda: None) if error is None else (lambda error=error: refused(error))
    verdicts[wrong_inputs.judged(call).split(":")[0]] += 1
  assert verdicts == collections.Counter(list(cases))
