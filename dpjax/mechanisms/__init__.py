"""Mechanisms that answer one question privately, and the budget that they spend.

Each mechanism is a frozen dataclass of public fields, called as `mechanism(key, data, ...)`. Its
docstring states the guarantee and the neighbouring relation. `.event(relation)` is its event for
`dpjax.accounting`. The relation defaults to add_or_remove_one, as in `dpjax.accounting`. A
mechanism that is private only under another relation raises UserError for this default.

| question                  | mechanism                                              |
| ------------------------- | ------------------------------------------------------ |
| a number or a vector      | Laplace, Gaussian                                      |
| one of k candidates       | Exponential, PermuteAndFlip, ReportNoisyMax            |
| each person's own label   | RandomizedResponse                                     |
| shares of many own labels | OptimizedUnaryEncoding, OptimizedLocalHashing          |
| statistics of numbers     | BoundedMean, Histogram, Quantile                       |
| statistics of channels    | ChannelStatistics                                      |
| how features are spread   | Whitening                                              |
| a linear model            | LeastSquares                                           |
| sums of features by class | ClassSums                                              |
| any function, on shards   | SampleAndAggregateMean, SampleAndAggregateVote         |
| what teachers agree on    | GNMax, ConfidentGNMax                                  |
| which queries stand out   | SparseVector                                           |
"""

from typing import TYPE_CHECKING

from dpjax import _lazy

if TYPE_CHECKING:
  from dpjax.mechanisms.additive import Gaussian as Gaussian
  from dpjax.mechanisms.additive import Laplace as Laplace
  from dpjax.mechanisms.additive import (
    analytic_noise_multiplier as analytic_noise_multiplier,
  )
  from dpjax.mechanisms.aggregate import SampleAndAggregateMean as SampleAndAggregateMean
  from dpjax.mechanisms.aggregate import SampleAndAggregateVote as SampleAndAggregateVote
  from dpjax.mechanisms.bounded import BoundedMean as BoundedMean
  from dpjax.mechanisms.bounded import Histogram as Histogram
  from dpjax.mechanisms.bounded import Quantile as Quantile
  from dpjax.mechanisms.budget import BudgetLedger as BudgetLedger
  from dpjax.mechanisms.budget import ShardCharge as ShardCharge
  from dpjax.mechanisms.channel_statistics import ChannelStatistics as ChannelStatistics
  from dpjax.mechanisms.class_sums import ClassSums as ClassSums
  from dpjax.mechanisms.frequency_oracles import (
    OptimizedLocalHashing as OptimizedLocalHashing,
  )
  from dpjax.mechanisms.frequency_oracles import (
    OptimizedUnaryEncoding as OptimizedUnaryEncoding,
  )
  from dpjax.mechanisms.least_squares import LeastSquares as LeastSquares
  from dpjax.mechanisms.least_squares import centred_labels as centred_labels
  from dpjax.mechanisms.least_squares import centred_norm as centred_norm
  from dpjax.mechanisms.response import RandomizedResponse as RandomizedResponse
  from dpjax.mechanisms.selection import Exponential as Exponential
  from dpjax.mechanisms.selection import PermuteAndFlip as PermuteAndFlip
  from dpjax.mechanisms.selection import ReportNoisyMax as ReportNoisyMax
  from dpjax.mechanisms.sparse_vector import SparseVector as SparseVector
  from dpjax.mechanisms.teacher_votes import ConfidentGNMax as ConfidentGNMax
  from dpjax.mechanisms.teacher_votes import GNMax as GNMax
  from dpjax.mechanisms.whitening import Whitening as Whitening
else:
  __getattr__, __dir__, __all__ = _lazy.attach(__name__, __file__)
