"""Client side of a federation of separate programs. A client need not trust the server.

The server chooses the parameters and the round, and may be malicious. So the client's randomness
does not depend on the server: the key of an answer comes from this machine's own entropy, is used
once and is dropped. A round is answered at most once, even if the server asks for it again: at the
same time, after a restart or in another run.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from dpjax import noise, validate
from dpjax.federated.client import ClientAlgorithm, Received
from dpjax.federated.cohort import Cohort, LocalBatches
from dpjax.federated.execution.client_loop import loop_clients
from dpjax.federated.execution.context import Context
from dpjax.types import Params
from dpjax.validate import UserError, Verbatim


def _new_key() -> jax.Array:
  """Draws the key for all randomness of one answer. Nobody else has the key, and it is not
  stored."""
  return noise.new_key(release=True)


def _spend(folder: pathlib.Path, round: int) -> None:
  """Records on disk that a round is answered. Raises UserError if it was answered before.

  Only one program can create the file, so two requests at the same time get one answer.
  """
  folder.mkdir(parents=True, exist_ok=True)
  try:
    note = os.open(folder / f"round_{round}", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
  except FileExistsError as error:
    raise UserError(
      "was answered before; a second answer would reveal more than was accounted",
      field="round",
      value=round,
    ) from error
  # The file and its entry in the folder must survive a loss of power, or a restart would answer
  # again.
  os.fsync(note)
  os.close(note)
  inside = os.open(folder, os.O_RDONLY)
  os.fsync(inside)
  os.close(inside)


def _checked_data(given: Any) -> tuple[LocalBatches, int]:
  # LocalBatches alone are a tuple of two, as well.
  if not (
    isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], LocalBatches)
  ):
    raise UserError(
      "must return (batches, number of examples), with batches as of "
      "federated.from_batches([examples], batch_size=10).batches[0]",
      field="local_data",
      value=Verbatim(type(given).__name__),
    )
  return given


class Client:
  """Computes a client's answers to a server that the client need not trust.

  Args:
    client: work of the client. Wrap it in `client_noise` for privacy against the server.
    local_data: `(client, round) -> (batches, number of examples)`; see `flower.client_app`.
    like: parameters whose structure, shapes and dtypes are the server's.
    num_rounds: largest number of answers that the client ever gives. Rounds are
      0 .. num_rounds - 1.
    folder: absolute path of the folder where the client notes the rounds that it has answered. The
      folder must outlive programs and runs: emptying it allows `num_rounds` more answers.

  Guarantee: with `client_noise(client, l2_clip_norm=C, noise_multiplier=z)` all answers
  together are (`local_epsilon(z, delta, num_rounds)`, delta)-private for the whole client under
  "replace_one". This holds against anyone who gets the answers and chooses what is asked.

  Raises:
    UserError: num_rounds < 1, or the path of the folder is relative.
  """

  def __init__(
    self,
    client: ClientAlgorithm,
    local_data: Callable[[int, int], tuple[LocalBatches, int]],
    like: Params,
    *,
    num_rounds: int,
    folder: pathlib.Path | str,
  ):
    validate.integer_at_least(1, num_rounds=num_rounds)
    self._folder = pathlib.Path(folder)
    self._num_rounds = num_rounds
    if not self._folder.is_absolute():
      raise UserError(
        "must be absolute, so that every program of this client finds the same",
        field="folder",
        value=str(folder),
      )
    self._local_data = local_data
    self.like = like
    self._run = loop_clients()(client, None)

  def answer(self, who: int, round: object, params: Params) -> Any:
    """Returns the `Sent` of client `who` in a round, and nothing else of its work.

    Raises:
      UserError: `round` is outside the run, or was answered before. Nothing is computed then. Or
        `local_data` returns something else than batches and their number of examples.
    """
    # isinstance accepts True as an int, which would record the round under another name.
    if type(round) is not int or not 0 <= round < self._num_rounds:
      raise UserError(
        f"must be an integer from 0 to num_rounds - 1 = {self._num_rounds - 1}",
        field="round",
        value=round,
      )
    # The round is recorded before the data are read. A crash afterwards costs an answer, but no
    # privacy.
    _spend(self._folder / f"client_{who}", round)
    batches, count = _checked_data(self._local_data(who, round))
    cohort = Cohort(np.array([who]), np.array([count], np.int64), (batches,))
    context = Context(Received(params), None, None, _new_key(), None)
    return jax.tree.map(lambda leaf: leaf[0], self._run(context, cohort).sent)
