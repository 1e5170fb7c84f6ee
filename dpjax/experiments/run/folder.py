"""The folder of one run while it goes on: whose it is, its lock, its keys, its end.

With several processes only process 0 uses files; all make the same calls.
"""

from __future__ import annotations

import contextlib
import pathlib
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from dpjax import trees
from dpjax.experiments.run import checkpoint, provenance, run_keys, writers
from dpjax.experiments.run import workdir as owner
from dpjax.experiments.run.experiment import STEPS_ARE, Experiment, Outcome, Result
from dpjax.experiments.run.run_keys import RunKeys
from dpjax.noise.gaussian import key_id
from dpjax.parallel.exchanges import is_first, on_first, same
from dpjax.validate import UserError

# Key of result.json and of a checkpoint: versions of libraries, and the SHA-256 of the user's own
# modules, at each start that made a step of the result.
STARTS = "starts"
SECONDS = "seconds"  # key of a checkpoint


class Folder:
  """What a run has in its folder, and what it writes there beside the checkpoints of its phases.

  Attributes:
    secrets: what the run stored to go on (`run_keys.to_meta`); None: it has not begun.
    result: content of result.json; None: the run has not finished.

  Raises:
    UserError: the folder holds another run, or other files.
  """

  def __init__(self, experiment: Experiment[Any], path: pathlib.Path):
    self.experiment = experiment
    self.path = path
    config = experiment.config
    self.secrets: Result | None = on_first(owner.recall_for, path, config)
    self.result: Result | None = on_first(owner.finished_result, path, config)
    self.run_id = ""
    self.key_name = ""
    self.hook: Any = None
    self._before = 0.0  # seconds of earlier starts
    self._earlier: list[Result] = []  # entries of `STARTS`
    self.began = time.monotonic()
    self.late: list[int] = []  # the signal of a last step, which stops the next phase
    self._wanted: Result = {}
    self._now: Result = {}
    self._lock = -1  # descriptor of the open lock

  @property
  def past(self) -> Result:
    """Returns the seconds that the run took, and its starts, with those before a resume."""
    seconds = self._before + time.monotonic() - self.began
    return {SECONDS: seconds, STARTS: [*self._earlier, self._now]}

  def resume(self, past: Mapping[str, Any]) -> None:
    """Goes on from the `past` that a checkpoint of any phase holds: the longest one counts."""
    self._before = max(self._before, float(past[SECONDS]))
    self._earlier = max(self._earlier, list(past[STARTS]), key=len)

  def admit(self, data: bytes, weights: Mapping[str, str]) -> RunKeys | None:
    """Returns the keys of the run, drawn if it begins now; None if it has finished.

    Args:
      data, weights: digests of the data, and of each file of weights by field.

    Raises:
      UserError: the folder holds a run on other data or weights, or parts of another run.
    """
    # The processes compare a value derived from the digest. No message shows the digest.
    same(data=data.hex(), weights=str(weights))
    experiment = self.experiment
    config: Any = experiment.config
    # Configs without sections name their data in a field.
    name = config.data.name if hasattr(config, "data") else getattr(config, "dataset", "")

    def meta() -> Result | None:
      named = {
        "weights": weights,
        "config": writers.digest(owner.config_of(self.path, config)),
      }
      if self.secrets is None:
        return run_keys.to_meta(data, experiment.new_keys(), **named)
      run_keys.check(self.secrets, data, **named, name=name, workdir=self.path)
      return self.secrets if self.result is None else None

    # The first process draws, and the others get its keys.
    found = on_first(meta)
    if found is None:
      return None
    random = run_keys.from_meta(config.seed, found)
    self._wanted = found
    self.run_id = found[run_keys.RUN]
    self.key_name = key_id(random.noise)
    return random

  def result_if_finished(self) -> Result:
    """Returns the result of a finished run, after what is made from it: a report if there is none,
    and what the experiment makes. A run may have been killed between its result and these."""
    assert self.result is not None
    steps = self.result.get(STEPS_ARE)

    def make_rest() -> None:
      whole = all(
        (path := self.path / name).is_file() and path.stat().st_size
        for name in writers.REPORT
      )
      if isinstance(steps, str) and not whole and writers.read_metrics(self.path):
        # Imported here: only the end of a run needs the plotting library.
        from dpjax.experiments.run import report

        report.train_report(self.path, steps=steps)
      self.experiment.end(self.path)

    on_first(make_rest)
    return self.result

  @contextlib.contextmanager
  def take(self) -> Iterator[None]:
    """Locks the folder and makes it this run's: config and keys are on disk inside the block."""
    # The modules that the config names are imported by now.
    self._now = {"versions": provenance.versions(), "modules": provenance.own_modules()}
    with contextlib.ExitStack() as held:
      held.enter_context(
        writers.space_on_disk(
          self.path, lambda: writers.newest_step(checkpoint.newest(self.path))
        )
      )
      on_first(self._take, held)
      # Configs without the field `writer` have no hook.
      if is_first() and getattr(self.experiment.config, "writer", None) is not None:
        # Imported here: few runs have a hook.
        from dpjax.experiments.run import row_hooks

        self.hook = row_hooks.of_run(self.experiment.config, self.path)
        if self.hook is not None:
          held.callback(self.hook.close)
      yield

  def _take(self, held: contextlib.ExitStack) -> None:
    self._lock = held.enter_context(writers.alone_in(self.path, checkpoint.FOLDER))
    begun = (self.path / owner.CONFIG).exists()
    # A release keeps its first keys: its folder is never emptied, even before the first step.
    fresh = not (begun or self.experiment.release or jax.process_count() > 1)
    stored = owner.claim(self.path, self.experiment.config)
    # What stands where a folder was moved away is not this run's.
    may_release = lambda: fresh and self._is_there()
    held.enter_context(owner.release_if_refused(self.path, may_release))
    # Two processes that both found nothing would draw two keys.
    if stored != self.secrets:
      raise UserError(
        "another process has just been at work there; run the same command again",
        field="workdir",
        value=self.path,
      )
    # Keys are on disk before any computation uses them, so a run that is killed later repeats the
    # same noise.
    if stored is None:
      owner.remember(self.path, self._wanted)

  def _is_there(self) -> bool:
    return writers.is_held(self.path / checkpoint.FOLDER / writers.LOCK, self._lock)

  def check_there(self) -> None:
    """Raises Gone if the folder was removed, moved or replaced while the run is at work. What is
    written into another one no later start would go on from."""
    if not self._is_there():
      raise writers.Gone(
        "was removed, moved or replaced while the run was at work; bring it back, then run the "
        "same command, which goes on from what was saved there",
        field="workdir",
        value=self.path,
      )

  def finish(self, outcome: Outcome) -> Result:
    """Writes parameters, other files, result.json and what is made from it. Returns the content of
    result.json."""

    def written() -> Result:
      self.check_there()
      experiment, past = self.experiment, self.past
      weights = self._wanted[run_keys.WEIGHTS]
      result = {
        "device": provenance.device(),
        **outcome.result(self.path),
        "release": experiment.release,
        "seed": experiment.config.seed,
        "num_parameters": trees.size(outcome.params),
        "params_sha256": trees.sha256(outcome.params),
        # Whoever rebuilds the model later needs these very files (`workdir.check_weights`).
        **({run_keys.WEIGHTS: weights} if weights else {}),
        # A release has no duration: the time of a step depends on the private size of its batch.
        "wall_seconds": None if experiment.release else round(past[SECONDS], 3),
        "versions": self._now["versions"],
        STARTS: past[STARTS],
      }
      # Parameters are written first, so that every result has its model beside it.
      owner.save_params(self.path / outcome.saved_as, outcome.params)
      outcome.write(self.path)
      result[owner.FILES] = owner.digests(self.path)
      return owner.write_result(self.path, experiment.config, result)

    self.result = on_first(written)
    return self.result_if_finished()
