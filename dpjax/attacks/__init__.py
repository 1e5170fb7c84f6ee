"""Attacks on trained models, by the pipelines that trained them.

Membership inference, from a model's answers to the line that its epsilon allows:

  halves = random_halves(17, len(records), seed=0)       # 16 shadows and a target
  scores = train_shadows(records, halves, algorithm=..., batches=plan.batches, ...)
  evidence = Evidence(scores[-1], scores[:-1], halves[:-1])
  score = MEMBERSHIP_ATTACKS["lira_fixed"](evidence)      # [n], knows nothing of halves[-1]
  found = measure(score, halves[-1])
  print(table({"lira_fixed": found}), judge(found.curve, allowed.by_plan(plan)).words)

An attack that finds little shows that it is weak, or the model private: which of the two, only
the proof can say. A stronger statement the other way, a lower bound on epsilon that holds at
95 % for one run, is `dpjax.auditing`'s.
"""

from dpjax.attacks import allowed as allowed
from dpjax.attacks import signals as signals
from dpjax.attacks.allowed import AllowedRoc as AllowedRoc
from dpjax.attacks.allowed import Judgement as Judgement
from dpjax.attacks.allowed import judge as judge
from dpjax.attacks.membership import MEMBERSHIP_ATTACKS as MEMBERSHIP_ATTACKS
from dpjax.attacks.membership import Evidence as Evidence
from dpjax.attacks.membership import confidence_rule as confidence_rule
from dpjax.attacks.membership import lira as lira
from dpjax.attacks.membership import loss_rule as loss_rule
from dpjax.attacks.membership import loss_threshold as loss_threshold
from dpjax.attacks.membership import rmia as rmia
from dpjax.attacks.roc import FPRS as FPRS
from dpjax.attacks.roc import Leakage as Leakage
from dpjax.attacks.roc import RateAtFpr as RateAtFpr
from dpjax.attacks.roc import Roc as Roc
from dpjax.attacks.roc import curve_of as curve_of
from dpjax.attacks.roc import measure as measure
from dpjax.attacks.roc import rate_at as rate_at
from dpjax.attacks.roc import slices as slices
from dpjax.attacks.roc import table as table
from dpjax.attacks.shadows import each_as_target as each_as_target
from dpjax.attacks.shadows import random_halves as random_halves
from dpjax.attacks.shadows import train_shadows as train_shadows
