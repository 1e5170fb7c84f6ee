"""Membership inference by a network for each class, which learns what answers about members look
like (Shokri et al. 2017).

The attacker trains shadow models, whose members he knows. All their answers about records of one
class, with and without the record among the members, teach a network of that class to tell members
apart. Unlike LiRA it does not compare answers about the SAME record, so that a record that is easy
for every model looks like a member.
"""

from __future__ import annotations

import warnings

import numpy as np

from dpjax import optional
from dpjax.attacks import signals
from dpjax.types import HostArray
from dpjax.validate import UserError

# Numbers of the source: one hidden layer of 64 units.
_HIDDEN = 64
_EPOCHS = 100


def attack_network(
  answers: HostArray,
  labels: HostArray,
  *,
  shadow_answers: HostArray,
  included: HostArray,
) -> np.ndarray:
  """Returns for each record the probability [n] that it is a member, by the network of its class.

  A class whose records were all members of the shadows, or none, gets 1/2.

  Args:
    answers: [n, K], the target's probabilities of each class for each record.
    labels: [n], integer labels of the records in 0 .. K - 1.
    shadow_answers: [S, n, K], probabilities of S shadow models for the same records.
    included: bool [S, n], which shadow was trained on which record.

  Raises UserError for shapes that do not match, NaN or numbers that are no probabilities.

  >>> sure, unsure = [1.0, 0.0], [0.5, 0.5]
  >>> held = np.arange(40).reshape(1, 40) % 2 == 0
  >>> shadow = np.where(held[0, :, None], sure, unsure)[None]
  >>> labels = np.zeros(40, int)
  >>> scores = attack_network(shadow[0], labels, shadow_answers=shadow, included=held)
  >>> (scores > 0.5).tolist() == held[0].tolist()
  True
  """
  own = _check_array("answers", answers, 2)
  theirs = _check_array("shadow_answers", shadow_answers, 3)
  held = np.asarray(included)
  classes = np.asarray(labels)
  if theirs.shape[1:] != own.shape:
    raise UserError(
      f"must be [shadows, {own.shape[0]}, {own.shape[1]}], as answers",
      field="shadow_answers.shape",
      value=theirs.shape,
    )
  if held.dtype != bool or held.shape != theirs.shape[:2]:
    raise UserError(f"must be bool of shape {theirs.shape[:2]}", field="included")
  if classes.dtype.kind not in "iu" or classes.shape != own.shape[:1]:
    raise UserError(f"must be integers [{len(own)}]", field="labels")
  scores = np.full(len(own), 0.5)
  for label in np.unique(classes):
    of_class = classes == label
    members = held[:, of_class].ravel()
    if members.all() or not members.any():
      continue
    known = theirs[:, of_class].reshape(-1, own.shape[1])
    scores[of_class] = _member_prob(known, members, own[of_class])
  return scores


def _member_prob(known: np.ndarray, members: np.ndarray, asked: np.ndarray) -> np.ndarray:
  """Trains a network on known answers [m, K], and returns its probabilities for others [n, K]."""
  # Imported here, since scikit-learn is slow to import.
  with optional.require_extra():
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.neural_network import MLPClassifier

  network = MLPClassifier((_HIDDEN,), max_iter=_EPOCHS, random_state=0)
  with warnings.catch_warnings():
    # A fixed number of epochs, after which it need not have converged.
    warnings.simplefilter("ignore", ConvergenceWarning)
    network.fit(known, members)
  return np.asarray(network.predict_proba(asked))[:, 1]


def _check_array(name: str, values: HostArray, rank: int) -> np.ndarray:
  array = signals.numbers(name, values)
  if array.ndim != rank or not array.size:
    wanted = "[n, K]" if rank == 2 else "[shadows, n, K]"
    raise UserError(f"must be {wanted}, none 0", field=f"{name}.shape", value=array.shape)
  # A probability of 1 may be rounded up in float32.
  if ((array < 0) | (array > 1 + 1e-6)).any():
    raise UserError(
      f"run from {array.min()} to {array.max()}: must lie in [0, 1]", field=name
    )
  return array
