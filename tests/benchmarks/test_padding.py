"""The table of padded batches is that of today's plans."""

import pytest

from benchmarks import padding
from tests import pages


@pytest.mark.long
@pytest.mark.parametrize("batch_size", padding.BATCHES)
def test_the_table_holds(batch_size):
  kept = pages.tables().entries("accounting/padding.csv")
  printed = [list(row.values()) for row in kept if row["batch size"] == str(batch_size)]
  made = [padding.row(batch_size, *named) for named in padding.plans(batch_size)]
  assert printed == [[str(cell) for cell in row] for row in made]
