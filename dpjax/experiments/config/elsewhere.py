"""What other libraries call a field, and the field's path here: the one table of it.

It is read where a field or a flag is unknown (`fields.place_of`), so that Opacus' `max_grad_norm`,
Flower's `fraction_fit` and scikit-learn's `random_state` are answered by our name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple


class _Row(NamedTuple):
  words: str  # names of others
  paths: str  # fields of ours, the best first: a kind of run has one of them, or none
  note: str = ""  # what differs between the two


# A word may stand in several rows: the first that has a field of the config answers.
_ROWS = (
  _Row(
    "eps target_epsilon target_eps privacy_budget", "task.epsilon privacy.epsilon epsilons"
  ),
  _Row("target_delta", "task.delta privacy.delta method.delta"),
  _Row(
    "max_grad_norm l2_norm_clip clip_norm clipping_norm clipping_bound clipping_threshold "
    "max_per_sample_grad_norm",
    "privacy.l2_clip_norm method.l2_clip_norm",
  ),
  _Row(
    "sigma noise noise_scale noise_multiplier",
    "privacy.noise_multiplier method.noise_multiplier",
  ),
  _Row("sigma noise noise_scale noise_multiplier", "std", "of the noise on each vote"),
  _Row("secure_mode secure_rng", "release"),
  _Row("sample_rate sampling_rate subsampling_rate q", "privacy.sampling_prob"),
  _Row(
    "batch_size train_batch_size local_batch_size per_device_train_batch_size "
    "minibatch_size",
    "local.batch_size task.batch_size method.batch_size batch_size",
  ),
  _Row(
    "batch_size train_batch_size per_device_train_batch_size minibatch_size",
    "privacy.sampling_prob",
    "batch size / number of examples",
  ),
  _Row(
    "microbatches num_microbatches max_physical_batch_size physical_batch_size",
    "microbatch_size",
    "a size; it bounds memory, and each example is clipped by itself",
  ),
  _Row(
    "epochs num_epochs num_train_epochs max_epochs",
    "local.epochs task.epochs method.epochs num_epochs epochs",
  ),
  _Row(
    "epochs num_epochs num_train_epochs max_epochs",
    "num_steps",
    "epochs * number of examples / batch size",
  ),
  _Row("local_epochs num_local_epochs client_epochs", "local.epochs"),
  _Row(
    "steps max_steps num_iterations max_iter n_iter total_steps", "num_steps num_rounds"
  ),
  _Row(
    "rounds num_server_rounds total_rounds central_num_iterations global_rounds comm_round",
    "num_rounds",
  ),
  _Row(
    "lr step_size learning_rate",
    "task.learning_rate optimizer.learning_rate client_optimizer.learning_rate "
    "method.learning_rate learning_rate teacher_rate",
  ),
  _Row("client_lr local_lr client_learning_rate", "client_optimizer.learning_rate"),
  _Row("server_lr server_learning_rate", "server_optimizer.learning_rate"),
  _Row("server_momentum", "server_optimizer.rule.momentum"),
  _Row(
    "fraction_fit fraction_train client_fraction sample_fraction participation_rate "
    "join_ratio",
    "clients_per_round",
    "an expected number of clients, no share",
  ),
  _Row(
    "num_clients_per_round clients_per_iteration cohort_size num_sampled_clients "
    "min_fit_clients min_train_nodes client_num_per_round",
    "clients_per_round",
  ),
  _Row(
    "num_partitions num_supernodes min_available_clients client_num_in_total",
    "partition.num_clients",
  ),
  _Row("dirichlet_alpha partition_alpha", "partition.alpha"),
  _Row("strategy federated_optimizer", "algorithm privacy.strategy"),
  _Row(
    "test_ratio test_fraction test_size val_ratio",
    "held_out",
    "of each client's rows",
  ),
  _Row("fine_tuning_epochs fine_tuning_epoch finetune_epochs", "fine_tune_epochs"),
  _Row("personal_layers personalized_layers", "algorithm.kept", "of algorithm=fed_bn"),
  _Row("proximal_mu prox_mu proximal_strength", "algorithm.mu", "of algorithm=fed_prox"),
  _Row("secagg secure_aggregation", "secure_sum"),
  _Row("grad_sample_mode", "grad_method"),
  _Row("random_state random_seed", "seed"),
  _Row("output_dir save_dir logdir", "workdir"),
)


def words() -> frozenset[str]:
  """Returns every name of others that the table answers."""
  return frozenset(word for row in _ROWS for word in row.words.split())


def find(word: str, paths: Iterable[str]) -> tuple[str, str] | None:
  """Returns (path, note) of the field that others call `word`, of those paths that there are.

  The paths may be of a section of a config, or of a config that holds others: only the last
  names must agree.

  >>> find("lr", ["seed", "client_optimizer.learning_rate"])
  ('client_optimizer.learning_rate', '')
  >>> find("lr", ["seed"])
  """
  # Of fields that agree, the one nearest to the root is meant.
  nearest = sorted(paths, key=lambda path: path.count("."))
  for row in _rows(word):
    for ours in row.paths.split():
      for path in nearest:
        if f".{path}".endswith(f".{ours}") or f".{ours}".endswith(f".{path}"):
          return path, row.note
  return None


def name_of(word: str) -> str | None:
  """Returns our name of what others call `word`, whether or not a config has it."""
  return next((row.paths.split()[0] for row in _rows(word)), None)


def _rows(word: str) -> tuple[_Row, ...]:
  return _BY_WORD.get(word, ())


_BY_WORD: Mapping[str, tuple[_Row, ...]] = {
  word: tuple(row for row in _ROWS if word in row.words.split()) for word in words()
}
