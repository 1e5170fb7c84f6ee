"""A map of where people are, of which nobody sees a single true place.

  python examples/places.py

Each of 50,000 simulated people is in one of 12 x 12 cells of a town, and sends one noisy message by
optimized local hashing, which is private by itself: no server needs to be trusted. The server
estimates the share of each cell. Negative shares, which are noise, are set to 0 and the sum to 1:
both read released numbers alone, so they cost no privacy.
Source: Wang et al. 2017, Locally differentially private protocols for frequency estimation.
Time: 4 s on two CPU cores.
"""

import numpy as np

import dpjax
from dpjax import mechanisms

SIDE, PEOPLE = 12, 50_000
random = np.random.default_rng(0)

# The station, the market, and those who are anywhere.
centres = np.array([[3.0, 8.5], [8.0, 3.0], [6.0, 6.0]])
spread = np.array([0.8, 1.0, 4.0])
group = random.choice(3, PEOPLE, p=[0.35, 0.25, 0.4])
points = centres[group] + spread[group, None] * random.normal(size=(PEOPLE, 2))
row, column = np.clip(np.floor(points), 0, SIDE - 1).astype(int).T
cells = row * SIDE + column
truth = np.bincount(cells, minlength=SIDE**2) / PEOPLE


def nearest_shares(shares: np.ndarray) -> np.ndarray:
  """Returns the nearest shares that are at least 0 and sum to 1."""
  down = np.sort(shares)[::-1]
  excess = (np.cumsum(down) - 1) / np.arange(1, len(down) + 1)
  return np.maximum(0, shares - excess[np.sum(down > excess) - 1])


def picture(shares: np.ndarray) -> str:
  """Returns a map: the darker a cell, the larger its share."""
  shade = np.minimum(9 * shares / truth.max(), 9).astype(int).reshape(SIDE, SIDE)
  return "\n".join("".join(" .:-=+*#%@"[level] * 2 for level in line) for line in shade)


maps, errors = {}, {}
for epsilon in (1.0, 4.0):
  oracle = mechanisms.OptimizedLocalHashing(epsilon, num_categories=SIDE**2)
  messages = oracle(dpjax.new_key(), cells)
  estimate = oracle.frequencies(messages)
  maps[epsilon] = nearest_shares(estimate)
  # What the formula says of a cell, and what was seen over all of them.
  stated = np.sqrt([oracle.variance(PEOPLE, share) for share in truth])
  errors[epsilon] = float(np.sqrt(np.mean((estimate - truth) ** 2 / stated**2)))
  print(
    f"epsilon {epsilon:g} a person, {oracle.buckets} hash values: std of a cell "
    f"{stated.mean():.4f}, errors {errors[epsilon]:.2f} of it; of the nearest shares "
    f"{np.abs(maps[epsilon] - truth).sum() / 2:.3f} lies in wrong cells"
  )
print(picture(truth), picture(maps[4.0]), sep="\n--- at epsilon 4\n")
