"""The judge of `tests.wrong_commands`: what a command line may end in, and what not."""

import random
import signal

import pytest

from tests import wrong_commands, wrong_inputs
from tests.wrong_commands import Ended

_LINE = "error: out='': must be a folder"


@pytest.mark.parametrize(
  ("ended", "word"),
  [
    (Ended(0, "note: a\nb\n", 1.0), "accepted"),
    (Ended(None, "", 2.0), "accepted"),
    (Ended(None, "", 30.0, is_hung=True), "slow"),
    (Ended(2, _LINE, 1.0), "refused"),
    (Ended(1, f"warning: few draws\n{_LINE}", 1.0), "refused"),
    (Ended(2, "error: " + "a" * 300, 1.0), "long"),
    (Ended(2, f"{_LINE}\nand more", 1.0), "long"),
    (Ended(2, "", 1.0), "long"),
    (Ended(1, "Traceback (most recent call last):\nKeyError: 1", 1.0), "traceback"),
    (Ended(70, "KeyError: 1", 1.0), "traceback"),
    (Ended(-signal.SIGSEGV, "", 1.0), "traceback"),
  ],
)
def test_a_command_ends_in_one_line_or_is_found(ended, word):
  assert wrong_commands.verdict(ended).split(":")[0] == word


@pytest.mark.parametrize("launcher", sorted(wrong_commands.SOUND))
def test_each_try_differs_from_the_sound_command_in_one_word(launcher):
  rng = random.Random(0)
  sound = [line.split() for line in wrong_commands.SOUND[launcher]]
  for number in range(20):
    words = wrong_commands.changed(launcher, number, rng, wrong_inputs.text_for)
    others = sound[number % len(sound)]
    same = sum(one == other for one, other in zip(words, others))
    assert len(words) >= len(others) and same >= len(others) - 1
