"""Film reviews over epsilon .5 to 8 on sentence embeddings of a public network, three seeds.

  python -m launch.sweep --config=configs/sweeps/movie_reviews.py --workdir=runs/reviews \\
    --config.base.data.data_dir=DIR

One line is configs/movie_reviews_minilm.py, the other a single release by least squares. The
epsilons are claimed, since the weights know text of the web. Needs what that config needs.
"""

from dpjax.experiments.sweeps.grid import SweepConfig


def get_config() -> SweepConfig:
  """Thirty runs of a linear model, by two methods."""
  from configs import movie_reviews_minilm

  base = movie_reviews_minilm.get_config()
  base.privacy.epsilon = None  # the grid has it
  return SweepConfig(
    base=base,
    grid={"privacy.epsilon": [0.5, 1.0, 2.0, 4.0, 8.0]},
    variants={"DP-SGD": {}, "least squares": {"privacy": "least_squares"}},
    series="variant",
    seeds=[0, 1, 2],
    title="Film reviews, embeddings of MiniLM + linear",
  )
