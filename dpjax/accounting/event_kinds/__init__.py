"""All kinds of events that are accounted: each file here registers its own at its end.

A file is imported with the sampler or the mechanism that makes its events. `kind.every_kind`
imports all of them.
"""
