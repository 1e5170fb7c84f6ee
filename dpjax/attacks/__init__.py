"""Attacks on what training releases: gradients, messages of clients, models.

Membership inference scores records by a model's answers. The verdict compares the true positive
rates of these scores with those that the plan's guarantee allows:

  halves = random_halves(17, len(records), seed=0)       # 16 shadows and a target
  scores = train_shadows(records, halves, algorithm=..., batches=plan.batches, ...)
  evidence = Evidence(scores[-1], scores[:-1], halves[:-1])
  score = MEMBERSHIP_ATTACKS["lira_fixed"](evidence)      # [n], knows nothing of halves[-1]
  found = measure(score, halves[-1])
  print(table({"lira_fixed": found}), judge(found.curve, allowed.by_plan(plan)).words)

Other attacks, each measured with exact intervals:

| what is attacked                     | attack                                               |
| ------------------------------------ | ---------------------------------------------------- |
| gradients and messages               | `Inversion`, leakage scores, `infer_labels`          |
| gradients of a model made to leak    | `imprint`, `read_imprint`, `fish`                    |
| text, from a language model          | `SpanAttack` on gradients; exposure of canaries      |
| a class, by the model's weights      | `ClassInversion`, judged by another network          |
| inputs, by the model's answers       | `AnswerInversion`, a decoder                         |
| the model, by its answers            | `Extraction`, `solve_softmax`                        |
| the training set as a whole          | `infer_property`, from weights or answers            |
| a missing attribute of a record      | `guessed_attribute`, `attribute_advantage`           |
| federated rounds, by lying clients   | `poisoned_training`, `measure_poisoning`             |

An attack that finds little is weak, or the model is private; only a proof can tell which of the
two is true. `dpjax.auditing` instead proves a lower bound on epsilon from one run, at 95 %
confidence.
"""

from typing import TYPE_CHECKING

from dpjax import _lazy

if TYPE_CHECKING:
  from dpjax.attacks import signals as signals
  from dpjax.attacks.allowed import judge as judge
  from dpjax.attacks.answer_inversion import AnswerInversion as AnswerInversion
  from dpjax.attacks.class_inversion import ClassInversion as ClassInversion
  from dpjax.attacks.exposure import CanaryFormat as CanaryFormat
  from dpjax.attacks.exposure import ExposureBound as ExposureBound
  from dpjax.attacks.exposure import exposure_by_rank as exposure_by_rank
  from dpjax.attacks.exposure import extrapolate as extrapolate
  from dpjax.attacks.exposure import sequence_losses as sequence_losses
  from dpjax.attacks.extraction import Extraction as Extraction
  from dpjax.attacks.fishing import fish as fish
  from dpjax.attacks.gradient_inversion import CosineAdam as CosineAdam
  from dpjax.attacks.gradient_inversion import Dlg as Dlg
  from dpjax.attacks.gradient_inversion import Inversion as Inversion
  from dpjax.attacks.membership import MEMBERSHIP_ATTACKS as MEMBERSHIP_ATTACKS
  from dpjax.attacks.membership import Evidence as Evidence
  from dpjax.attacks.membership import lira as lira
  from dpjax.attacks.membership import loss_threshold as loss_threshold
  from dpjax.attacks.membership import rmia as rmia
  from dpjax.attacks.poisoning import backdoor as backdoor
  from dpjax.attacks.poisoning import label_flip as label_flip
  from dpjax.attacks.poisoning import scaled_update as scaled_update
  from dpjax.attacks.reconstructions import fidelity as fidelity
  from dpjax.attacks.reconstructions import picture as picture
  from dpjax.attacks.reconstructions import psnr as psnr
  from dpjax.attacks.reconstructions import success as success
  from dpjax.attacks.recovery import as_gradient as as_gradient
  from dpjax.attacks.recovery import first_dense as first_dense
  from dpjax.attacks.recovery import infer_labels as infer_labels
  from dpjax.attacks.roc import measure as measure
  from dpjax.attacks.roc import table as table
  from dpjax.attacks.rogue_server import imprint as imprint
  from dpjax.attacks.shadows import each_as_target as each_as_target
  from dpjax.attacks.shadows import random_halves as random_halves
  from dpjax.attacks.shadows import train_shadows as train_shadows
  from dpjax.attacks.text_from_gradients import SpanAttack as SpanAttack
  from dpjax.attacks.text_from_gradients import attention_inputs as attention_inputs
  from dpjax.attacks.views import all_at_once as all_at_once
  from dpjax.attacks.views import client_view as client_view
  from dpjax.attacks.views import soft_labels as soft_labels
else:
  __getattr__, __dir__, __all__ = _lazy.attach(__name__, __file__)
