"""What a sum by SecAgg or SecAgg+ costs, by formula, and with whom it goes on."""

from __future__ import annotations

from collections.abc import Collection

from dpjax.secure.sums.interface import Cost, Present
from dpjax.secure.sums.terms import Terms, neighbours
from dpjax.validate import UserError


def _near(terms: Terms, who: int, there: Collection[int]) -> int:
  """Returns how many neighbours of a client are in `there`."""
  if terms.degree is None:
    return len(there) - (who in there)
  return sum(other in there for other in neighbours(terms, who))


def going_on(terms: Terms, there: Present) -> Present:
  """Returns the clients left in each phase, if clients with too few neighbours refuse to go on.

  Raises:
    UserError: the protocol would refuse the sum.
  """
  named = frozenset(there.named)

  def go_on(wish: Collection[int], among: frozenset[int]) -> frozenset[int]:
    ready = (who for who in wish if who in among)
    left = frozenset(x for x in ready if _near(terms, x, among) + 1 >= terms.threshold)
    if len(left) < terms.fewest:
      raise UserError(
        f"only {len(left)} clients would be left; the sum is refused",
        field="min_survivors",
        value=terms.fewest,
      )
    return left

  sharing = go_on(there.sharing, named)
  uploading = go_on(there.uploading, sharing)
  unmasking = go_on(there.unmasking, uploading)
  for who in sharing:
    shares = _near(terms, who, unmasking) + (who in unmasking)
    # The server must rebuild the own mask of a client that uploaded. It must rebuild the mask key
    # of a client that is gone if a neighbour has added a mask for it.
    needed = who in uploading or _near(terms, who, uploading) > 0
    if needed and shares < terms.threshold:
      raise UserError(
        f"too few shares of client {who}; the sum is refused", field="revealed"
      )
  order = lambda ids: tuple(sorted(ids))
  return Present(there.named, order(sharing), order(uploading), order(unmasking))


def predict_cost(terms: Terms, there: Present) -> Cost:
  """Predicts the cost of a sum in which these clients answer (`going_on`); seconds are 0.

  If all n clients answer, there are n (k + 2) expansions, 2 n k agreements and n (b + O(k)) bytes.
  Here k is the degree (n - 1 without a graph), and b is the number of bytes of a vector.

  >>> terms = Terms(
  ...   session=bytes(16), clients=tuple(range(10)), threshold=6, min_survivors=6, length=1000
  ... )
  >>> cost = predict_cost(terms, Present(*[tuple(range(10))] * 4))
  >>> cost.expansions, cost.operations, cost.client_bytes
  (110, 180, 6459)
  """
  phases = [frozenset(ids) for ids in there]
  named, sharing, uploading, _ = phases
  sent = {who: _client_bytes(terms, who, phases) for who in named}
  gone = [_near(terms, who, uploading) for who in sharing - uploading]
  near_named = sum(_near(terms, who, named) for who in sharing)
  near_sharing = sum(_near(terms, who, sharing) for who in uploading)
  return Cost(
    client_bytes=max(sent.values()),
    server_bytes=sum(sent.values()),
    expansions=near_sharing + 2 * len(uploading) + sum(gone),
    operations=near_named + near_sharing + sum(gone),
  )


def _client_bytes(terms: Terms, who: int, phases: list[frozenset[int]]) -> int:
  """Returns the number of bytes that one client sends and receives in all phases."""
  named, sharing, uploading, unmasking = phases
  total = terms.size("keys", 1) + terms.size("roster", _near(terms, who, named))
  if who in sharing:
    total += terms.size("envelopes", _near(terms, who, named))
    total += terms.size("forwarded", _near(terms, who, sharing))
  held = _near(terms, who, sharing) + 1
  if who in uploading:
    total += terms.size("masked", 1) + terms.size("survivors", held)
  if who in unmasking:
    total += terms.size("revealed", held)
    if terms.directory:
      total += terms.size("agreed", 1) + terms.size("signatures", len(unmasking))
  return total
