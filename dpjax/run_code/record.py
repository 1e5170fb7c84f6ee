"""A record of a run's code, and the check that a resumed run still has it."""

from __future__ import annotations

import hashlib
import json
import types
from collections.abc import Mapping
from typing import Any, NamedTuple

from dpjax.validate import UserError


class Code(NamedTuple):
  """The code of a run. `modules` and `versions` are public and name no folder."""

  modules: dict[str, str]  # the user's modules: name -> SHA-256
  versions: dict[str, str]  # packages: name -> version, or version and SHA-256
  files: frozenset[str] = frozenset()  # paths of the modules on this machine
  # SHA-256, by name, of files that the user's modules read, of values that these modules computed,
  # and of environment variables that they name. All of these may depend on private data, so the
  # digests are as secret as the data.
  inputs: Mapping[str, str] = types.MappingProxyType({})
  read: frozenset[str] = frozenset()  # paths of the files in `inputs`
  # `loaded.number_of_changes` when the search began. This record does not cover later loads.
  as_of: int = 0

  def digest(self) -> bytes:
    """Returns 32 bytes that identify the code.

    >>> Code({}, {}).digest() == Code({}, {"jax": "0.10"}).digest()
    False
    """
    text = json.dumps([sorted(self.modules.items()), sorted(self.versions.items())])
    return hashlib.sha256(f"dpjax code {text}".encode()).digest()

  def secret_digest(self) -> bytes:
    """Returns 32 bytes that identify the code's inputs; b"" for none. They are as secret as the
    data.

    >>> Code({}, {}).secret_digest(), len(Code({}, {}, inputs={"a": "1"}).secret_digest())
    (b'', 32)
    """
    if not self.inputs:
      return b""
    text = json.dumps(sorted(self.inputs.items()))
    return hashlib.sha256(f"dpjax inputs {text}".encode()).digest()

  def to_json(self) -> dict[str, dict[str, str]]:
    """Returns the code as JSON data, for result.json and a run's checkpoints."""
    return {"modules": self.modules, "versions": self.versions}


def check_same(before: Mapping[str, Any] | None, code: Code, *, workdir: object) -> None:
  """Raises UserError, which names the module or package, unless a run was begun with this code.

  Args:
    before: `Code.to_json()` of the run in the workdir. None: the run did not record its code, and
      is refused.
  """
  then = "bring that back, or choose another directory, nothing was changed"
  if before is None:
    raise UserError(
      "holds a run of an earlier version, which did not remember its code, so it "
      "cannot be gone on with; choose another directory, nothing was changed",
      field="workdir",
      value=workdir,
    )
  for kind, now in code.to_json().items():
    held = before.get(kind, {})
    changed = sorted(name for name in {**held, **now} if held.get(name) != now.get(name))
    if not changed:
      continue
    name = changed[0]
    if kind == "modules":
      raise UserError(
        f"module {name!r}: is not the code of the run in workdir={workdir}, which was begun "
        f"with another version of it; {then}"
      )
    was = str(held.get(name)).partition(" ")[0]
    version = str(now.get(name)).partition(" ")[0]
    earlier = f"{was}, not {version}" if was != version else f"another state of {was}"
    raise UserError(
      f"the run in workdir={workdir} was begun with {earlier}; {then}", field=name
    )


def check_inputs(before: Mapping[str, str] | None, code: Code, *, workdir: object) -> None:
  """Raises UserError, which names the input, unless a run was begun with these inputs of
  its code.

  Args:
    before: `Code.inputs` of the run in the workdir. None: the run had no inputs.
  """
  held = before or {}
  now = code.inputs
  changed = sorted(name for name in {**held, **now} if held.get(name) != now.get(name))
  if changed:
    raise UserError(
      f"{changed[0]}: is not what the code of the run in workdir={str(workdir)[-100:]} read or "
      "computed when it was begun; bring that back, or choose another directory, nothing was "
      "changed"
    )
