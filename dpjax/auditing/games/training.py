"""Games against whole trainings: `dp_sgd` as users run it, on a loss linear in a record.

The released parameters show each step's private mean gradient. The adversary knows the direction in
which the record pulls at the released parameters before the step. It projects the step on this
direction. Along it each step is a normal variable around a sum of signs, as in `plans`. In one game
the adversary sees every number of every step instead, and looks for noise that repeats.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpjax import training
from dpjax.auditing.games import plans
from dpjax.auditing.games.game import Game, repeats
from dpjax.plan import Plan
from dpjax.sampling import PoissonSampler
from dpjax.types import Batch, Example, LossFn, Params

# A record is in about half of the steps.
_HALF = PoissonSampler(sampling_prob=0.5, capacity=4)
_OTHERS = np.zeros(2)
_WEIGHTS = np.array([[1.0, -2.0], [0.5, 1.0]], np.float32)

MakePlan = Callable[..., Plan]


class _Trained(NamedTuple):
  """Arguments of `dp_sgd` for one subject, and the loss that the adversary knows."""

  params: Params
  loss: LossFn
  tx: optax.GradientTransformation
  # Loss of one record. Its gradient at the released parameters is the direction of the record's
  # pull.
  known: LossFn
  augments: bool = False


def _linear(params: Any, example: Example) -> Any:
  return example.x * jnp.sum(params["w"] * jnp.array([1.0, -1.0]))


def _product(params: Any, example: Example) -> Any:
  """Returns a loss that is linear in the record and in w. With `lora`, w is W + A B, so the loss is
  bilinear in the factors A and B, plus a constant."""
  left = example.x * jnp.array([[1.0, 2.0]])
  return jnp.sum(left @ params["w"])


_VECTOR = {"w": np.zeros(2, np.float32), "other": np.ones(2, np.float32)}


def _dp_sgd() -> _Trained:
  return _Trained(_VECTOR, _linear, optax.sgd(1.0), _linear)


def _lora() -> _Trained:
  matrix = {"w": jnp.asarray(_WEIGHTS)}
  adapted = training.lora(matrix, "w", rank=1, alpha=1.0, key=jax.random.key(0))
  loss = adapted.apply(_product)
  return _Trained(adapted.trainable, loss, optax.sgd(1.0), loss)


def _of_part() -> _Trained:
  both = lambda params, example: (
    _linear(params, example) + example.x * jnp.sum(params["other"])
  )
  loss, tx = training.of_part(both, optax.sgd(1.0), "w".__eq__)
  return _Trained(_VECTOR, loss, tx, loss)


def _augment() -> _Trained:
  longer = lambda key, x: x * (1 + jax.random.uniform(key))
  loss = training.augment(_linear, longer, augmult=2)
  return _Trained(_VECTOR, loss, optax.sgd(1.0), _linear, augments=True)


def _runner(
  build: Callable[[], _Trained], plan: Plan, *, whole: bool = False
) -> Callable[..., Any]:
  """Returns the function (keys [n], gradients [n, steps, batch], mask) -> projections [n, steps].

  With `whole` it returns the changes of all trained numbers instead: [n, steps, numbers].
  """
  trained = build()
  key = jax.random.key(0) if trained.augments else None
  one_record = Example(jnp.float32(1.0), jnp.int32(0), None)

  def train_once(noise_key: Any, values: Any, masks: Any) -> Any:
    init, step = training.dp_sgd(
      trained.loss, plan, trained.tx, noise_key=noise_key, example_key=key
    )

    def body(state: Any, batch: Any) -> Any:
      records = Example(batch[0], jnp.zeros(batch[0].shape, jnp.int32), None)
      after, _ = step(state, Batch(records, batch[1]))
      pull = jax.grad(trained.known)(state.params, one_record)
      moved = jax.tree.map(jnp.subtract, state.params, after.params)
      if whole:
        numbers = [jnp.ravel(leaf) for leaf in jax.tree.leaves(moved)]
        return after, jnp.concatenate(numbers) * plan.normalize_by / plan.l2_bound
      return after, optax.tree.vdot(pull, moved) / optax.tree.norm(pull)

    return jax.lax.scan(body, init(trained.params), (values, masks))[1]

  return jax.jit(jax.vmap(train_once))


def _games(build: Callable[[], _Trained], make_plan: MakePlan = Plan) -> list[Game]:
  def played(case: str, others: np.ndarray, **how: Any) -> Game:
    runner = functools.partial(_runner, build, **how)
    plan = plans.small_plan(make_plan, sampler=_HALF)
    return plans.game(case, plan, (others, np.append(1.0, others)), runner=runner)

  whole = played("a record added, every number seen", _OTHERS, whole=True)
  return [
    played("a record added, alone", _OTHERS),
    played("a record added, against others", _OTHERS - 1.0),
    dataclasses.replace(whole, adversary=repeats),
  ]


_BUILDERS: dict[str, Callable[[], _Trained]] = {
  "dp_sgd": _dp_sgd,
  "lora": _lora,
  "of_part": _of_part,
  "augment": _augment,
}
# Subject -> function (make_plan) -> its games, the strongest first.
GAMES: dict[str, Callable[..., list[Game]]] = {
  name: functools.partial(_games, build) for name, build in _BUILDERS.items()
}
_OF_A_BATCH = "a loss of a whole batch, never private"
_READS = "reads a state that is released"
_VIEWS = "changes the input of one example, whose gradient is clipped"
_VOTES = "parts and votes before their noise: GNMax and ConfidentGNMax, which have games"
_PUBLIC = "reads public data, votes and parameters that are released"
NO_CLAIM = {
  "alignment": _OF_A_BATCH,
  "alignment_and_uniformity": _OF_A_BATCH,
  "adversarial": "its critic is trained by dp_sgd, which has a game; all else is post-processing",
  "distillation": "its teacher is trained by dp_sgd, which has a game; all else is post-processing",
  "joint_distillation": "dp_sgd, which has a game, on the parameters of two networks",
  "gradient_penalty": "a part of the loss of one example, which dp_sgd clips",
  "contrastive": _OF_A_BATCH,
  "contrastive_loss": _OF_A_BATCH,
  "on_sphere": _OF_A_BATCH,
  "uniformity": _OF_A_BATCH,
  **dict.fromkeys(("two_views", "crop_color", "flip_shift", "shift"), _VIEWS),
  **dict.fromkeys(("average", "states", "check"), _READS),
  **dict.fromkeys(("parts", "padded_parts", "vote_counts"), _VOTES),
  **dict.fromkeys(("public_graph", "spread_labels", "student_weights"), _PUBLIC),
  **dict.fromkeys(("check_declared", "check_public_key"), "refuses, and computes nothing"),
  "clip_scale": _READS,
  "eval_params": _READS,
  "noise_state": "reads the secret state of a run, which is not released",
}
