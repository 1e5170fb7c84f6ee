"""The number of records that a mechanism may depend on.

Under add-or-remove-one, neighbours differ in their number of records, so the number is secret. A
divisor, a probability or a number of steps computed from it would reveal whether a record is
present, whatever noise is added: even the scale of the noise would reveal it (arXiv 2605.15648
audits this). So these are computed from a declared constant. Under the other relations, neighbours
have equally many records.
"""

from __future__ import annotations

from dpjax.sampling.registry import Scheme
from dpjax.validate import UserError

ADD_OR_REMOVE_ONE = "add_or_remove_one"


def usual_relation(scheme: Scheme | None) -> str:
  """Returns the neighboring relation of a run whose config names no relation.

  Args:
    scheme: row of the sampler; None: a user's sampler, or a run without one.
  """
  if scheme is None or scheme.relation_is_named:
    return ADD_OR_REMOVE_ONE
  return scheme.kind.relations[0]


def named_size(real: int, declared: int | None, *, relation: str) -> int | None:
  """Returns the number of records that a guarantee may name; None: the number is secret, and no
  constant is declared.

  Use it for a mechanism that does not depend on the number of records: then no declaration is
  needed.

  Args:
    real: true number of records.
    declared: declared constant; None: no number was declared.
    relation: neighboring relation of the guarantee.

  >>> named_size(99, None, relation="add_or_remove_one")
  >>> named_size(99, None, relation="replace_one")
  99
  """
  return declared if relation == ADD_OR_REMOVE_ONE else real


def public(
  real: int,
  declared: int | None,
  *,
  relation: str,
  promised: bool,
  field: str,
  other: str,
) -> int:
  """Returns the number of records from which plan, guarantee and results are computed.

  Args:
    real: true number of records: secret under add_or_remove_one, public under other relations.
    declared: declared constant; None: no number was declared.
    relation: neighboring relation of the guarantee.
    promised: whether the run has a guarantee. If not, the true number may be used.
    field: config field that declares the number, for the message.
    other: field=value that makes the true number public, for the message.

  Raises:
    UserError: the true number is secret, and the declared number is missing or above twice the
      true number. `Plan.check_capacity` refuses a number that is too small for the capacity.

  >>> args = dict(relation="add_or_remove_one", promised=True, field="n", other="r=x")
  >>> [public(real, 100, **args) for real in (60, 99, 100, 101)]
  [100, 100, 100, 100]
  >>> public(100, None, **{**args, "relation": "replace_special"})
  100
  """
  if relation != ADD_OR_REMOVE_ONE:
    return real
  # Without a guarantee, the true number replaces a missing or far too large declaration.
  if not promised:
    return real if declared is None or 2 * real < declared else declared
  if declared is None:
    raise UserError(
      "own data under add_or_remove_one need a declared public size, as their "
      f"true one is a secret: --config.{field}=N, a round number near it, or "
      f"--config.{other}",
      field=field,
      value=None,
    )
  if 2 * real < declared:
    raise UserError(
      "is declared, and the data have less than half as many records; must be "
      f"near the true number, or --config.{other}",
      field=field,
      value=declared,
    )
  return declared
