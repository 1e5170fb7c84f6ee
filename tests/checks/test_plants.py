"""Every planted bug is refused by its row of the table; sound runs pass all rows.

The whole walk, with the table under results/: `python -m tests.checks.plants PATH`.
"""

import pytest

from dpjax.checks import influence, noise_distributions, noise_record
from tests.checks import plants

# A few of each class, which every change should pass by; the rest is long.
_QUICK = {
  "noise_cut_at_3", "steps_in_pairs_permuted", "noise_in_bfloat16", "empty_batch_is_row_0",
  "clip_to_the_median", "keys_of_the_seed", "noise_is_augmentation",
  "last_record_never_drawn", "seed_mod_1000", "optimizer_with_raw_gradients",
  "ledger_charges_fewer_steps", "records_less_the_batch_mean", "large_batches_cut_far_out",
}  # fmt: skip
_TAILS = 4_000_000


@pytest.fixture(scope="module")
def sound():
  return plants.subject()


@pytest.mark.cases(
  quick=[
    "keys_of_the_seed",
    "noise_is_augmentation",
    "records_less_the_batch_mean",
    "last_record_never_drawn",
    "seed_mod_1000",
  ],
  long=...,
)
@pytest.mark.parametrize(
  "name",
  [
    pytest.param(name, marks=() if name in _QUICK else pytest.mark.long)
    for name in plants.PLANTS
  ],
)
def test_a_planted_bug_is_refused(sound, name, monkeypatch):
  if plants.PLANTS[name].row is noise_distributions.noise_tails and name not in _QUICK:
    monkeypatch.setattr(noise_record, "_TAIL", 2 * _TAILS)
  row = plants.run(name, sound)
  assert row.passed is False, row


@pytest.mark.long
def test_sound_runs_pass_the_rows_of_plants(sound):
  rows = dict.fromkeys(plant.row for plant in plants.PLANTS.values())
  for row in rows:
    assert row(sound).passed is True, row(sound)


def test_sixty_plants_and_reasons_for_those_that_are_not_seen():
  assert len(plants.PLANTS) >= 60 and {*plants.PLANTS} >= _QUICK
  assert all(plants.UNSEEN.values()) and not {*plants.UNSEEN} & {*plants.PLANTS}


@pytest.mark.long
@pytest.mark.parametrize("number", range(6))
def test_other_keys_raise_no_false_alarm(sound, number, monkeypatch):
  """Sound noise under other keys than the fixed ones: none of several thousand numbers
  exceeds its bound."""
  honest = noise_record.test_key
  other = lambda subject, which: honest(subject, which + 1_000_000 * (number + 1))
  monkeypatch.setattr(noise_record, "test_key", other)
  for row in (
    noise_distributions.noise_std,
    noise_distributions.noise_independence,
    noise_distributions.noise_tails,
  ):
    assert row(sound).passed is True, row(sound)


@pytest.mark.slow
def test_short_gradients_are_among_the_regimes(sound):
  """A bug that acts below the clip norm alone would not be met at the first parameters."""
  detail = influence.any_mask(sound).detail
  assert float(detail.rsplit(" ", 3)[1]) < 1e-3, detail
