"""Epsilon put to the test: canaries, likelihood ratios, and the lower bounds they prove."""

from dpjax.auditing.bounds import METHODS as METHODS
from dpjax.auditing.bounds import Scores as Scores
from dpjax.auditing.bounds import clopper_pearson as clopper_pearson
from dpjax.auditing.bounds import clopper_pearson_interval as clopper_pearson_interval
from dpjax.auditing.bounds import delta_from_mu as delta_from_mu
from dpjax.auditing.bounds import epsilon_from_mu as epsilon_from_mu
from dpjax.auditing.bounds import gdp_lower_bound as gdp_lower_bound
from dpjax.auditing.bounds import mu_from_epsilon as mu_from_epsilon
from dpjax.auditing.bounds import one_run as one_run
from dpjax.auditing.bounds import one_run_fdp as one_run_fdp
from dpjax.auditing.bounds import one_run_p_value as one_run_p_value
from dpjax.auditing.canaries import KINDS as KINDS
from dpjax.auditing.canaries import SCORES as SCORES
from dpjax.auditing.canaries import Canaries as Canaries
from dpjax.auditing.canaries import gradient_scores as gradient_scores
from dpjax.auditing.canaries import insert_canaries as insert_canaries
from dpjax.auditing.canaries import loss_scores as loss_scores
from dpjax.auditing.canaries import split_scores as split_scores
from dpjax.auditing.gradient_canaries import gradient_canaries as gradient_canaries
from dpjax.auditing.likelihood import discrete_log_ratio as discrete_log_ratio
from dpjax.auditing.likelihood import gaussian_log_ratio as gaussian_log_ratio
from dpjax.auditing.likelihood import laplace_log_ratio as laplace_log_ratio
from dpjax.auditing.likelihood import likelihood_ratio as likelihood_ratio
from dpjax.auditing.likelihood import trial_scores as trial_scores
from dpjax.auditing.report import Audit as Audit
from dpjax.auditing.report import audit as audit
