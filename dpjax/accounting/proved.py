"""Neighbouring relations, and names of the accountants whose epsilon is proved.

Which of them hold for an event stands in its `EventKind`; for a sampler, in its `relations`.
"""

import enum


class NeighboringRelation(enum.StrEnum):
  """Rule by which two data sets count as neighbours; an epsilon means nothing without it.

  A relation is equal to its name, and is printed as its name.

  >>> NeighboringRelation("add_or_remove_one")
  'add_or_remove_one'
  """

  ADD_OR_REMOVE_ONE = "add_or_remove_one"  # one record more or less: sensitivity C
  REPLACE_ONE = "replace_one"  # one record exchanged: sensitivity 2 C
  REPLACE_SPECIAL = "replace_special"  # one record zeroed out: sensitivity C

  __repr__ = str.__repr__


ACCOUNTANTS = ("pld", "rdp")
RELATIONS = tuple(NeighboringRelation)
ADD, REPLACE, ZERO = RELATIONS
