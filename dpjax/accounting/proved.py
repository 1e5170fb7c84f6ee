"""The table of proofs: sampling scheme -> relations and accountants that have a proof.

Each row is defined by its owner, an `EventKind` or a sampler class
(`dpjax.sampling.Sampler.proof`), and entered here by `declare`.
"""

from __future__ import annotations

from typing import NamedTuple

from dpjax import validate
from dpjax.validate import UserError

ACCOUNTANTS = ("pld", "rdp")
ADD = "add_or_remove_one"
REPLACE = "replace_one"
ZERO = "replace_special"
RELATIONS = (ADD, REPLACE, ZERO)


class Proved(NamedTuple):
  """Row of the table of proofs: relations with a proof, default first; accountants, tightest first.

  >>> Proved(("replace_one",), ("rdp",)).accountants_under("add_or_remove_one")
  ()
  """

  relations: tuple[str, ...]
  accountants: tuple[str, ...] = ACCOUNTANTS

  def accountants_under(self, neighboring_relation: str) -> tuple[str, ...]:
    """Returns the accountants that prove an epsilon under a relation; () if there is no proof."""
    return self.accountants if neighboring_relation in self.relations else ()

  def checked_relation(self, asked: str, name: str) -> str:
    """Returns the relation that is asked for, or for "" the default relation.

    Args:
      asked: one of `RELATIONS`, or "".
      name: name of the sampler or event, for the message.

    Raises:
      UserError: the relation is unknown, or has no proof although other relations have one.

    >>> Proved(("replace_one",)).checked_relation("", "FixedSizeSampler")
    'replace_one'
    """
    relation = asked or (*self.relations, ADD)[0]
    validate.one_of(RELATIONS, neighboring_relation=relation)
    if self.relations and relation not in self.relations:
      raise UserError(
        f"{name} is proved only under {', '.join(self.relations)}",
        field="neighboring_relation",
        value=relation,
      )
    return relation


NOTHING_PROVED = Proved(())
PROVED: dict[str, Proved] = {}


def declare(scheme: str, proof: Proved) -> Proved:
  """Enters a proof into the table under the name of its sampling scheme; returns the proof.

  >>> declare("unproved", NOTHING_PROVED).relations
  ()
  """
  PROVED[scheme] = proof
  return proof


# "none" is the scheme of a run without sampling, where every record is in every step.
declare("none", Proved(RELATIONS))
declare("unproved", NOTHING_PROVED)


def proved_for(sampler: str) -> Proved:
  """Returns the row of the table of proofs for the sampling scheme named `sampler`.

  >>> from dpjax.accounting import event_kinds
  >>> proved_for("truncated_poisson").relations
  ('replace_special',)
  """
  validate.one_of(PROVED, sampler=sampler)
  return PROVED[sampler]


def accountants_for(sampler: str, neighboring_relation: str) -> tuple[str, ...]:
  """Returns the accountants that prove an epsilon for a sampling scheme under a relation.

  >>> from dpjax.accounting import event_kinds
  >>> accountants_for("fixed_size", "replace_one"), accountants_for("poisson", "replace_one")
  (('pld', 'rdp'), ())
  """
  return proved_for(sampler).accountants_under(neighboring_relation)
