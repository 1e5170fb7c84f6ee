"""One main for every kind of run."""

import pytest

from dpjax.experiments.run.kind import KINDS, experiment_of
from launch import main
from tests import commands


@pytest.mark.slow
@pytest.mark.parametrize(
  ("command", "config"),
  [("pate", "configs/pate/quickstart.py"), ("secure", "configs/secure/quickstart.py")],
)
def test_the_launcher_of_any_kind_reads_a_config_as_that_of_its_kind(command, config):
  flags = (f"--config={config}", "--print_config")
  own = commands.run(f"launch.{command}", *flags)
  general = commands.run("launch.run", *flags)
  assert general.returncode == 0 and general.stdout == own.stdout != ""
  positional = commands.run("launch.run", config, "--print_config")
  assert positional.stdout == own.stdout


def test_a_flag_of_one_run_is_refused_for_several(tmp_path):
  (tmp_path / "table.py").write_text(
    "from dpjax.experiments.kinds.secure.config import SecureConfig as get_config\n"
  )
  flags = ("--coordinator=h:1", "--num_processes=1", "--process_id=0")
  line = commands.refusal(commands.run("launch.run", "table.py", *flags, cwd=tmp_path))
  assert line.startswith("error: --coordinator='h:1': ")


class _Runs:
  def __init__(self, *rows, alarm=""):
    self.rows, self.told, self.table = rows, alarm, self

  def run(self, workdir):
    return list(self.rows)

  def report(self, workdir):
    return f"wrote {workdir}"

  def alarm(self, rows):
    return self.told


_DONE = {"name": "a", "status": "done", "error": None}
_FAILED = {"name": "b", "status": "failed", "refusal": ["no data", "", None, ""]}


@pytest.mark.parametrize(
  ("table", "out", "err"),
  [
    (_Runs(_DONE), "wrote w\n", None),
    # Other processes are at all runs, so that attacks.md may not be there yet.
    (_Runs(), "", None),
    (_Runs(_DONE, alarm="refuted"), "wrote w\n", "error: refuted\n"),
    (_Runs(_DONE, _FAILED), "", "error: b: no data; 1 of 2 runs failed\n"),
    (_Runs(_DONE, _FAILED, alarm="refuted"), "", "error: refuted\n"),
  ],
)
def test_several_runs_end_with_their_report_an_alarm_or_what_failed(
  table, out, err, capsys
):
  if err is None:
    main._end(table, "w", list(table.rows))
  else:
    with pytest.raises(SystemExit) as ended:
      main._end(table, "w", list(table.rows))
    assert ended.value.code == 1
  assert capsys.readouterr() == (out, err or "")


class _Run:
  def line(self, result):
    return "150 steps"

  def alarm(self, result):
    return ""


@pytest.mark.parametrize(
  ("finished", "out"),
  [
    (False, "150 steps\nwrote {0}/result.json\n"),
    (True, "finished before: 150 steps\nkept {0}/result.json\n"),
  ],
)
def test_a_run_that_had_finished_before_says_so(finished, out, tmp_path, capsys):
  (tmp_path / "result.json").touch()
  main._end_one(_Run(), str(tmp_path), {}, finished=finished)
  assert capsys.readouterr().out == out.format(tmp_path)


def test_each_command_has_its_config_alone():
  classes = [kind.config_class for kind in KINDS.values()]
  assert len(set(classes)) == len(classes)
  configs = [kind.config_class() for kind in KINDS.values() if kind.experiment is not None]
  assert all(experiment_of(config).config is config for config in configs)
