"""Accounting: events, epsilon, calibration, the ledger and the privacy statement.

It uses NumPy, SciPy and dp_accounting, and does not import JAX.
"""

from typing import TYPE_CHECKING

from dpjax import _lazy

if TYPE_CHECKING:
  from dpjax.accounting import calibration as calibration
  from dpjax.accounting import discrete as discrete
  from dpjax.accounting import gdp as gdp
  from dpjax.accounting import overflow as overflow
  from dpjax.accounting import shuffle as shuffle
  from dpjax.accounting import tuning as tuning
  from dpjax.accounting import votes as votes
  from dpjax.accounting.attack_bounds import Advantage as Advantage
  from dpjax.accounting.attack_bounds import AttackBound as AttackBound
  from dpjax.accounting.attack_bounds import BayesRisk as BayesRisk
  from dpjax.accounting.attack_bounds import GaussianDp as GaussianDp
  from dpjax.accounting.attack_bounds import TruePositiveRate as TruePositiveRate
  from dpjax.accounting.attack_bounds import advantage as advantage
  from dpjax.accounting.attack_bounds import attack_bound as attack_bound
  from dpjax.accounting.attack_bounds import bayes_risk as bayes_risk
  from dpjax.accounting.attack_bounds import true_positive_rate as true_positive_rate
  from dpjax.accounting.bins import balls_in_bins_event as balls_in_bins_event
  from dpjax.accounting.bins import balls_in_bins_proved as balls_in_bins_proved
  from dpjax.accounting.calibration import Unreachable as Unreachable
  from dpjax.accounting.calibration import (
    calibrate_noise_multiplier as calibrate_noise_multiplier,
  )
  from dpjax.accounting.calibration import (
    calibrate_noise_to_attack as calibrate_noise_to_attack,
  )
  from dpjax.accounting.calibration import calibrate_num_steps as calibrate_num_steps
  from dpjax.accounting.calibration import (
    calibrate_sampling_prob as calibrate_sampling_prob,
  )
  from dpjax.accounting.epsilon import delta as delta
  from dpjax.accounting.epsilon import delta_curve as delta_curve
  from dpjax.accounting.epsilon import epsilon as epsilon
  from dpjax.accounting.epsilon import epsilon_curve as epsilon_curve
  from dpjax.accounting.epsilon import epsilon_of_zcdp as epsilon_of_zcdp
  from dpjax.accounting.epsilon import privacy_profile as privacy_profile
  from dpjax.accounting.epsilon import zcdp as zcdp
  from dpjax.accounting.event_kinds.bounded_contribution import (
    BoundedContributionDpEvent as BoundedContributionDpEvent,
  )
  from dpjax.accounting.event_kinds.bounded_contribution import (
    bounded_contribution_event as bounded_contribution_event,
  )
  from dpjax.accounting.event_kinds.composition import composed as composed
  from dpjax.accounting.event_kinds.discrete_gaussian import (
    DiscreteGaussianDpEvent as DiscreteGaussianDpEvent,
  )
  from dpjax.accounting.event_kinds.elements import accountants_for as accountants_for
  from dpjax.accounting.event_kinds.elements import check_accountant as check_accountant
  from dpjax.accounting.event_kinds.elements import merged_parts as merged_parts
  from dpjax.accounting.event_kinds.elements import parts as parts
  from dpjax.accounting.event_kinds.fixed_size import fixed_size_event as fixed_size_event
  from dpjax.accounting.event_kinds.k_out_of_t import KOutOfTDpEvent as KOutOfTDpEvent
  from dpjax.accounting.event_kinds.k_out_of_t import k_out_of_t_event as k_out_of_t_event
  from dpjax.accounting.event_kinds.kind import DpEvent as DpEvent
  from dpjax.accounting.event_kinds.kind import EventKind as EventKind
  from dpjax.accounting.event_kinds.kind import event_from_json as event_from_json
  from dpjax.accounting.event_kinds.kind import event_to_json as event_to_json
  from dpjax.accounting.event_kinds.kind import register as register
  from dpjax.accounting.event_kinds.noisy_sum import gaussian_event as gaussian_event
  from dpjax.accounting.event_kinds.noisy_sum import laplace_event as laplace_event
  from dpjax.accounting.event_kinds.noisy_sum import (
    poisson_sampled_event as poisson_sampled_event,
  )
  from dpjax.accounting.event_kinds.random_allocation import (
    RandomAllocationDpEvent as RandomAllocationDpEvent,
  )
  from dpjax.accounting.event_kinds.random_allocation import (
    random_allocation_event as random_allocation_event,
  )
  from dpjax.accounting.event_kinds.random_allocation import unamplified as unamplified
  from dpjax.accounting.event_kinds.randomized_response import (
    pure_dp_event as pure_dp_event,
  )
  from dpjax.accounting.event_kinds.repeat_and_select import (
    repeat_and_select_event as repeat_and_select_event,
  )
  from dpjax.accounting.event_kinds.skellam import SkellamDpEvent as SkellamDpEvent
  from dpjax.accounting.event_kinds.smooth_sensitivity import (
    SmoothSensitivityDpEvent as SmoothSensitivityDpEvent,
  )
  from dpjax.accounting.event_kinds.truncated_poisson import (
    truncated_poisson_event as truncated_poisson_event,
  )
  from dpjax.accounting.event_kinds.with_replacement import (
    with_replacement_event as with_replacement_event,
  )
  from dpjax.accounting.ledger import Budget as Budget
  from dpjax.accounting.ledger import BudgetExceeded as BudgetExceeded
  from dpjax.accounting.ledger import Charge as Charge
  from dpjax.accounting.ledger import Ledger as Ledger
  from dpjax.accounting.loss_masses import Profile as Profile
  from dpjax.accounting.matrix import amplified_costs as amplified_costs
  from dpjax.accounting.matrix import correlated_events as correlated_events
  from dpjax.accounting.matrix import joined as joined
  from dpjax.accounting.matrix import participation_costs as participation_costs
  from dpjax.accounting.matrix import sensitivity as sensitivity
  from dpjax.accounting.monte_carlo import MOST_APART as MOST_APART
  from dpjax.accounting.monte_carlo import MonteCarloEpsilon as MonteCarloEpsilon
  from dpjax.accounting.monte_carlo import balls_in_bins_epsilon as balls_in_bins_epsilon
  from dpjax.accounting.monte_carlo import min_sep_epsilon as min_sep_epsilon
  from dpjax.accounting.proved import ACCOUNTANTS as ACCOUNTANTS
  from dpjax.accounting.proved import RELATIONS as RELATIONS
  from dpjax.accounting.statement import NOTHING as NOTHING
  from dpjax.accounting.statement import delta_warning as delta_warning
  from dpjax.accounting.statement import privacy_statement as privacy_statement
  from dpjax.accounting.text import by_name as by_name
  from dpjax.accounting.text import lower as lower
  from dpjax.accounting.text import upper as upper
  from dpjax.accounting.trade_off import TradeOff as TradeOff
  from dpjax.accounting.trade_off import all_pairs as all_pairs
  from dpjax.accounting.trade_off import all_pairs_of as all_pairs_of
  from dpjax.accounting.trade_off import pairs_of as pairs_of
  from dpjax.accounting.trade_off import trade_off as trade_off
else:
  __getattr__, __dir__, __all__ = _lazy.attach(__name__, __file__)
