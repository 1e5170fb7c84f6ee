"""Names of neighbouring relations, and of the accountants whose epsilon is proved.

Which of them hold for an event stands in its `EventKind`; for a sampler, in its `relations`.
"""

ACCOUNTANTS = ("pld", "rdp")
ADD = "add_or_remove_one"
REPLACE = "replace_one"
ZERO = "replace_special"
RELATIONS = (ADD, REPLACE, ZERO)
