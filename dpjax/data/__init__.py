"""Data sets as NumPy arrays with random access, which Poisson sampling needs.

`load` reads a named data set as two `Dataset`s, (train, test); `from_arrays` makes a `Dataset` of
your arrays. `dataset[indices]` is a `dpjax.types.Example` batch. A `Federation` says which rows
belong to which client. `partition` deals rows to artificial clients, `by_client` groups by ids.
`natural_federation`, `leaf_federation`, `tff_federation`, `pfl_federation` and
`shakespeare_federation` read natural federations.
No function here fits a transformation to the data; `preprocess` says why, and what to use instead.
"""

from typing import TYPE_CHECKING

from dpjax import _lazy

if TYPE_CHECKING:
  from dpjax.data import partition as partition
  from dpjax.data import preprocess as preprocess
  from dpjax.data.dataset import Dataset as Dataset
  from dpjax.data.dataset import from_arrays as from_arrays
  from dpjax.data.dataset import in_files as in_files
  from dpjax.data.federation import Federation as Federation
  from dpjax.data.federation import by_client as by_client
  from dpjax.data.identity import digest as digest
  from dpjax.data.image_folders import image_folder as image_folder
  from dpjax.data.tables import clipped_cells as clipped_cells
  from dpjax.data.tables import table as table
  from dpjax.data.target_kinds import Interval as Interval
  from dpjax.data.target_kinds import Labels as Labels
  from dpjax.data.text_files import text_file as text_file
  from dpjax.zoo.datasets.registry import load as load
else:
  __getattr__, __dir__, __all__ = _lazy.attach(__name__, __file__)
