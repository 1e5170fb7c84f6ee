"""Accounting: events, epsilon, calibration, the ledger and the privacy statement.

It uses NumPy, SciPy and dp_accounting, and does not import JAX.
"""

from typing import TYPE_CHECKING

from dpjax import _lazy

if TYPE_CHECKING:
  from dpjax.accounting import discrete as discrete
  from dpjax.accounting import votes as votes
  from dpjax.accounting.attack_bounds import Advantage as Advantage
  from dpjax.accounting.attack_bounds import BayesRisk as BayesRisk
  from dpjax.accounting.attack_bounds import GaussianDp as GaussianDp
  from dpjax.accounting.attack_bounds import TruePositiveRate as TruePositiveRate
  from dpjax.accounting.attack_bounds import true_positive_rate as true_positive_rate
  from dpjax.accounting.bins import balls_in_bins_event as balls_in_bins_event
  from dpjax.accounting.bins import balls_in_bins_proved as balls_in_bins_proved
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
  from dpjax.accounting.epsilon import epsilon as epsilon
  from dpjax.accounting.epsilon import epsilon_curve as epsilon_curve
  from dpjax.accounting.event_kinds.elements import compose as compose
  from dpjax.accounting.event_kinds.fixed_size import fixed_size_event as fixed_size_event
  from dpjax.accounting.event_kinds.k_out_of_t import k_out_of_t_event as k_out_of_t_event
  from dpjax.accounting.event_kinds.noisy_sum import gaussian_event as gaussian_event
  from dpjax.accounting.event_kinds.noisy_sum import laplace_event as laplace_event
  from dpjax.accounting.event_kinds.noisy_sum import (
    poisson_sampled_event as poisson_sampled_event,
  )
  from dpjax.accounting.event_kinds.with_replacement import (
    with_replacement_event as with_replacement_event,
  )
  from dpjax.accounting.ledger import Budget as Budget
  from dpjax.accounting.ledger import Ledger as Ledger
  from dpjax.accounting.monte_carlo import balls_in_bins_epsilon as balls_in_bins_epsilon
  from dpjax.accounting.statement import privacy_statement as privacy_statement
  from dpjax.accounting.text import upper as upper
  from dpjax.accounting.trade_off import pairs_of as pairs_of
else:
  __getattr__, __dir__, __all__ = _lazy.attach(__name__, __file__)
