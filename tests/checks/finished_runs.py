"""Folders of finished runs, written as `loop.train` does, without a training."""

import dataclasses

from dpjax import accounting
from dpjax.experiments.config import choices
from dpjax.experiments.kinds.central.config import (
  DataConfig,
  DpSgd,
  ModelConfig,
  TrainConfig,
)
from dpjax.experiments.run import guarantee, workdir, writers
from dpjax.plan import Plan
from dpjax.sampling import PoissonSampler

CONFIG = TrainConfig(
  data=DataConfig(name="digits", limit=200),
  model=ModelConfig(name="linear"),
  privacy=DpSgd(epsilon=2.0, l2_clip_norm=1.0, sampling_prob=0.1),
  num_steps=4,
  eval_every=4,
)
SAMPLER = PoissonSampler(sampling_prob=0.1, capacity=64)


def write(folder, seed, sampler=SAMPLER):
  """Writes a run of 4 steps; returns its folder."""
  rules = {"l2_clip_norm": 1.0, "normalize_by": 20, "num_steps": 4, "delta": 1e-5}
  plan = Plan(sampler=sampler, noise_multiplier=1.0, **rules)
  stated = guarantee.of_plan(plan, 200)
  ledger = accounting.Ledger().charge(
    plan.step_event(),
    num_steps=4,
    l2_clip_norm=1.0,
    neighboring_relation=plan.neighboring_relation,
    noise_key_id=f"key {seed}",
    first_step=0,
  )
  folder.mkdir()
  config = dataclasses.replace(CONFIG, seed=seed)
  writers.write_json(folder / "config.json", choices.to_dict(config))
  facts = stated.facts(ledger, plan.epsilon())
  others = dict.fromkeys(writers.RESULT_KEYS)
  workdir.write_result(folder, config, {**others, **facts, "ledger": ledger.to_json()})
  return folder
