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
| federated rounds, by lying clients   | `poisoned_training`, `poisoning_grid`                |

An attack that finds little is weak, or the model is private; only a proof can tell which of the
two is true. `dpjax.auditing` instead proves a lower bound on epsilon from one run, at 95 %
confidence.
"""

from typing import TYPE_CHECKING

from dpjax import _lazy

if TYPE_CHECKING:
  from dpjax.attacks import allowed as allowed
  from dpjax.attacks import signals as signals
  from dpjax.attacks.allowed import AllowedRoc as AllowedRoc
  from dpjax.attacks.allowed import Judgement as Judgement
  from dpjax.attacks.allowed import judge as judge
  from dpjax.attacks.answer_inversion import AnswerInversion as AnswerInversion
  from dpjax.attacks.answer_inversion import Decoder as Decoder
  from dpjax.attacks.answer_inversion import DecoderScore as DecoderScore
  from dpjax.attacks.answer_inversion import judge_decoder as judge_decoder
  from dpjax.attacks.attribute_inference import AttributeAdvantage as AttributeAdvantage
  from dpjax.attacks.attribute_inference import attribute_advantage as attribute_advantage
  from dpjax.attacks.attribute_inference import guessed_attribute as guessed_attribute
  from dpjax.attacks.class_inversion import ClassInversion as ClassInversion
  from dpjax.attacks.class_inversion import InversionScore as InversionScore
  from dpjax.attacks.class_inversion import Inverted as Inverted
  from dpjax.attacks.class_inversion import judge_inversion as judge_inversion
  from dpjax.attacks.collusion import alie as alie
  from dpjax.attacks.collusion import colluding as colluding
  from dpjax.attacks.collusion import min_max as min_max
  from dpjax.attacks.collusion import min_sum as min_sum
  from dpjax.attacks.difficulty import quantile_regression as quantile_regression
  from dpjax.attacks.exposure import CanaryFormat as CanaryFormat
  from dpjax.attacks.exposure import Exposure as Exposure
  from dpjax.attacks.exposure import ExposureBound as ExposureBound
  from dpjax.attacks.exposure import Extrapolation as Extrapolation
  from dpjax.attacks.exposure import exposure_by_rank as exposure_by_rank
  from dpjax.attacks.exposure import extrapolate as extrapolate
  from dpjax.attacks.exposure import sequence_losses as sequence_losses
  from dpjax.attacks.extraction import Agreement as Agreement
  from dpjax.attacks.extraction import Extraction as Extraction
  from dpjax.attacks.extraction import agreement as agreement
  from dpjax.attacks.extraction import ask as ask
  from dpjax.attacks.extraction import extraction_curve as extraction_curve
  from dpjax.attacks.extraction import solve_softmax as solve_softmax
  from dpjax.attacks.fishing import fish as fish
  from dpjax.attacks.fitting import Fit as Fit
  from dpjax.attacks.gradient_inversion import CosineAdam as CosineAdam
  from dpjax.attacks.gradient_inversion import Dlg as Dlg
  from dpjax.attacks.gradient_inversion import Inversion as Inversion
  from dpjax.attacks.gradient_inversion import Reconstruction as Reconstruction
  from dpjax.attacks.information import informia as informia
  from dpjax.attacks.leakage import LeakageScore as LeakageScore
  from dpjax.attacks.leakage import dense_leakage as dense_leakage
  from dpjax.attacks.leakage import distance_correlation as distance_correlation
  from dpjax.attacks.leakage import recovered_leakage as recovered_leakage
  from dpjax.attacks.membership import Evidence as Evidence
  from dpjax.attacks.membership import confidence_rule as confidence_rule
  from dpjax.attacks.membership import lira as lira
  from dpjax.attacks.membership import loss_rule as loss_rule
  from dpjax.attacks.membership import loss_threshold as loss_threshold
  from dpjax.attacks.membership import relative_confidence as relative_confidence
  from dpjax.attacks.membership import rmia as rmia
  from dpjax.attacks.membership_table import MEMBERSHIP_ATTACKS as MEMBERSHIP_ATTACKS
  from dpjax.attacks.poisoning import Poisoning as Poisoning
  from dpjax.attacks.poisoning import Trigger as Trigger
  from dpjax.attacks.poisoning import attacker_memory as attacker_memory
  from dpjax.attacks.poisoning import backdoor as backdoor
  from dpjax.attacks.poisoning import choose_attackers as choose_attackers
  from dpjax.attacks.poisoning import label_flip as label_flip
  from dpjax.attacks.poisoning import poisoned as poisoned
  from dpjax.attacks.poisoning import poisoned_training as poisoned_training
  from dpjax.attacks.poisoning import recruited as recruited
  from dpjax.attacks.poisoning import scaled_messages as scaled_messages
  from dpjax.attacks.poisoning import scaled_update as scaled_update
  from dpjax.attacks.property_inference import Populations as Populations
  from dpjax.attacks.property_inference import answers_on as answers_on
  from dpjax.attacks.property_inference import infer_property as infer_property
  from dpjax.attacks.property_inference import populations as populations
  from dpjax.attacks.property_inference import sorted_weights as sorted_weights
  from dpjax.attacks.queries import MOST_QUERIES as MOST_QUERIES
  from dpjax.attacks.queries import augmented as augmented
  from dpjax.attacks.queries import mean_score as mean_score
  from dpjax.attacks.queries import queries_of_model as queries_of_model
  from dpjax.attacks.reconstructions import Fidelity as Fidelity
  from dpjax.attacks.reconstructions import Success as Success
  from dpjax.attacks.reconstructions import fidelity as fidelity
  from dpjax.attacks.reconstructions import identified as identified
  from dpjax.attacks.reconstructions import lpips as lpips
  from dpjax.attacks.reconstructions import matched as matched
  from dpjax.attacks.reconstructions import mse as mse
  from dpjax.attacks.reconstructions import picture as picture
  from dpjax.attacks.reconstructions import psnr as psnr
  from dpjax.attacks.reconstructions import ssim as ssim
  from dpjax.attacks.reconstructions import success as success
  from dpjax.attacks.recovery import NothingSent as NothingSent
  from dpjax.attacks.recovery import as_gradient as as_gradient
  from dpjax.attacks.recovery import first_dense as first_dense
  from dpjax.attacks.recovery import infer_labels as infer_labels
  from dpjax.attacks.rmia_tuning import RmiaSettings as RmiaSettings
  from dpjax.attacks.rmia_tuning import rmia_tuned as rmia_tuned
  from dpjax.attacks.rmia_tuning import tune_rmia as tune_rmia
  from dpjax.attacks.robustness import Defence as Defence
  from dpjax.attacks.robustness import PoisoningOutcome as PoisoningOutcome
  from dpjax.attacks.robustness import breakdown_points as breakdown_points
  from dpjax.attacks.robustness import defences as defences
  from dpjax.attacks.robustness import measure_poisoning as measure_poisoning
  from dpjax.attacks.robustness import poisoning_grid as poisoning_grid
  from dpjax.attacks.robustness import poisoning_table as poisoning_table
  from dpjax.attacks.roc import FPRS as FPRS
  from dpjax.attacks.roc import Leakage as Leakage
  from dpjax.attacks.roc import RateAtFpr as RateAtFpr
  from dpjax.attacks.roc import Roc as Roc
  from dpjax.attacks.roc import auc_interval as auc_interval
  from dpjax.attacks.roc import counted as counted
  from dpjax.attacks.roc import curve_of as curve_of
  from dpjax.attacks.roc import loss_tail as loss_tail
  from dpjax.attacks.roc import measure as measure
  from dpjax.attacks.roc import rate_at as rate_at
  from dpjax.attacks.roc import slices as slices
  from dpjax.attacks.roc import table as table
  from dpjax.attacks.rogue_server import imprint as imprint
  from dpjax.attacks.rogue_server import read_imprint as read_imprint
  from dpjax.attacks.shadows import each_as_target as each_as_target
  from dpjax.attacks.shadows import random_halves as random_halves
  from dpjax.attacks.shadows import shadow_models as shadow_models
  from dpjax.attacks.shadows import train_shadows as train_shadows
  from dpjax.attacks.student_t import bavaria as bavaria
  from dpjax.attacks.text_from_gradients import SpanAttack as SpanAttack
  from dpjax.attacks.text_from_gradients import attention_inputs as attention_inputs
  from dpjax.attacks.text_from_gradients import tokens_recovered as tokens_recovered
  from dpjax.attacks.views import View as View
  from dpjax.attacks.views import all_at_once as all_at_once
  from dpjax.attacks.views import client_view as client_view
  from dpjax.attacks.views import gradient_view as gradient_view
  from dpjax.attacks.views import soft_labels as soft_labels
else:
  __getattr__, __dir__, __all__ = _lazy.attach(__name__, __file__)
