"""Fewer values in the tails than `launch.check` draws: tests of the tails ask for their own."""

import pytest

from dpjax.checks import noise_record


@pytest.fixture(autouse=True)
def _short_tails(monkeypatch):
  monkeypatch.setattr(noise_record, "_TAIL", 300_000)
