"""All samplers of dpjax; a config may name those whose `used_for` is not empty.

A sampler's class defines all that is known of it. Lists by use are derived from the classes.

| sampler                 | an example takes part in                               |
| ----------------------- | ------------------------------------------------------ |
| PoissonSampler          | any step, independently                                |
| UserSampler             | any step, as part of its user's block, independently   |
| RandomAllocationSampler | one step of every pass, drawn anew, uniformly          |
| KOutOfTSampler          | k steps of every pass, a uniform set, drawn anew       |
| TruncatedPoissonSampler | any step; a batch that is too large is cut at random   |
| FixedSizeSampler        | a uniform subset of fixed size                         |
| WithReplacementSampler  | a batch of uniform draws, maybe several times          |
| ShuffledSampler         | one step of every epoch, a permutation cut in batches  |
| CyclicSampler           | one fixed step of every pass                           |
| CyclicPoissonSampler    | its group's turn, with probability `turn_prob`         |
| BallsInBinsSampler      | one step of every pass, drawn once, uniformly          |
| MinSepSampler           | any step, at least `steps_apart` after its last one    |
| BoundedContribution-    | any step, independently; the guarantee is for a user,  |
|   Sampler               | who owns several examples                              |
"""

from __future__ import annotations

from dpjax.sampling.balls_in_bins import BallsInBinsSampler
from dpjax.sampling.bounded_contribution import BoundedContributionSampler
from dpjax.sampling.cyclic import CyclicSampler
from dpjax.sampling.cyclic_poisson import CyclicPoissonSampler
from dpjax.sampling.fixed_size import FixedSizeSampler
from dpjax.sampling.k_out_of_t import KOutOfTSampler
from dpjax.sampling.min_sep import MinSepSampler
from dpjax.sampling.poisson import PoissonSampler
from dpjax.sampling.random_allocation import RandomAllocationSampler
from dpjax.sampling.samplers import Sampler
from dpjax.sampling.shuffled import ShuffledSampler
from dpjax.sampling.truncated_poisson import TruncatedPoissonSampler
from dpjax.sampling.user_sampler import UserSampler
from dpjax.sampling.with_replacement import WithReplacementSampler

_ALL: tuple[type[Sampler], ...] = (
  PoissonSampler,
  UserSampler,
  RandomAllocationSampler,
  KOutOfTSampler,
  TruncatedPoissonSampler,
  FixedSizeSampler,
  WithReplacementSampler,
  ShuffledSampler,
  CyclicSampler,
  CyclicPoissonSampler,
  BallsInBinsSampler,
  MinSepSampler,
  BoundedContributionSampler,
)
SAMPLERS: dict[str, type[Sampler]] = {kind.name: kind for kind in _ALL}


def used_for(purpose: str) -> dict[str, type[Sampler]]:
  """Returns name -> class of the samplers for a purpose.

  Args:
    purpose: "examples" of central training; "clients" of a federated run; or "correlated noise",
      for which a sampler must declare how far apart an example's steps are.

  >>> list(used_for("clients"))
  ['poisson', 'fixed_size']
  """
  return {name: kind for name, kind in SAMPLERS.items() if purpose in kind.used_for}


def answered(how: str) -> tuple[str, ...]:
  """Returns the names of the samplers whose epsilon `launch.account` computes in the way `how`.

  Args:
    how: "exact" for the epsilon of the accountants, or "simulated" for a simulated epsilon, which
      is shown beside proved ones.

  >>> answered("simulated")
  ('balls_in_bins', 'min_sep')
  """
  return tuple(name for name, kind in SAMPLERS.items() if kind.answers == how)
