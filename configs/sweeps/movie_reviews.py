"""Film reviews over epsilon .5 to 8 on sentence embeddings of a public network, three seeds.

  python -m launch.sweep --config=configs/sweeps/movie_reviews.py --workdir=runs/reviews \\
    --config.base.data.data_dir=DIR

One line is configs/movie_reviews_minilm.py, the other a single release by least squares. The
epsilons are claimed, since the weights know text of the web. Needs what that config needs.
"""

from collections.abc import Iterator
from typing import Any

from dpjax.experiments.config import fields
from dpjax.experiments.sweeps.sweep import Sweep


def get_config() -> Sweep:
  """Thirty runs of a linear model, by two methods."""
  from configs import movie_reviews_minilm

  return Sweep(
    base=movie_reviews_minilm.get_config(),
    epsilons=[0.5, 1.0, 2.0, 4.0, 8.0],
    series="variant",
    seeds=[0, 1, 2],
    title="Film reviews, embeddings of MiniLM + linear",
  )


def get_configs(sweep: Sweep) -> Iterator[tuple[str, Any]]:
  for name, method in (("DP-SGD", "dp_sgd"), ("least squares", "least_squares")):
    for epsilon in sweep.epsilons:
      changes = {"privacy": method, "privacy.epsilon": epsilon}
      yield f"{name} @ {epsilon:g}", fields.replace_all(sweep.base, changes)
