"""Programs that processes of their own can import, and links that keep what crosses them, which
can be told from uniform bytes."""

import os
import signal
import time

import numpy as np
from scipy import stats

from dpjax.secure import mpc
from dpjax.secure.mpc import ring64, secureml

RECIPE = secureml.Recipe(learning_rate=0.5)
BATCHES = np.arange(24).reshape(3, 8) % 16


class Recording:
  """A link that keeps all messages, both ways."""

  def __init__(self, link):
    self._link, self.seen = link, []

  def __getattr__(self, name):
    return getattr(self._link, name)

  def send(self, data):
    self.seen.append(data)
    self._link.send(data)

  def receive(self, length):
    data = self._link.receive(length)
    self.seen.append(data)
    return data

  def exchange(self, data):
    other = self._link.exchange(data)
    self.seen += [data, other]
    return other


def overheard(program):
  """The program, which also returns what crossed the link meanwhile."""

  def run(party, *inputs):
    party.link = Recording(party.link)
    return program(party, *inputs), b"".join(party.link.seen)

  return run


def _train(party, network, x, y):
  return secureml.train(party, network, x, y, BATCHES, RECIPE)


def train(party, network, x, y):
  """Shares of a network after a few steps, and what crossed the link meanwhile."""
  return overheard(_train)(party, network, x, y)


def dies(party):
  if party.number:
    os._exit(1)
  return mpc.relu(party, np.zeros(3, np.uint64))


def hangs(party):
  if party.number:
    time.sleep(60)
  return mpc.relu(party, np.zeros(3, np.uint64))


def raises(party):
  if party.number:
    ring64.encode(1e9)
  return mpc.relu(party, np.zeros(3, np.uint64))


def stops(party):
  if party.number:
    os.kill(os.getpid(), signal.SIGSTOP)
  return mpc.relu(party, np.zeros(3, np.uint64))


def has_a_bug(party):
  if party.number:
    raise KeyError("a bug of its own")
  return mpc.relu(party, np.zeros(3, np.uint64))


def looks_uniform(data: bytes) -> bool:
  """Chi-squared of bytes, and of each bit; false where one place is one in 55 % of words."""
  raw = np.frombuffer(data, np.uint8)
  of_bytes = stats.chisquare(np.bincount(raw, minlength=256)).pvalue
  ones = np.unpackbits(raw.reshape(-1, 8), axis=1).sum(0)
  of_bits = stats.binomtest(int(ones.sum()), 64 * len(raw) // 8).pvalue
  each = [stats.binomtest(int(one), len(raw) // 8).pvalue for one in ones]
  return min(of_bytes, of_bits, 64 * min(each)) > 1e-6
