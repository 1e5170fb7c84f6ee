"""The code of a run, so that edited code never shares noise with the code before the edit.

Two runs with the same noise and different code reveal their exact clipped sums: the difference of
their releases holds no noise. So `of` names the code, `experiments.run.run_keys` binds every key to
that name, and a run can be resumed with the same code only.

| code                                            | is identified by                           |
| ----------------------------------------------- | ------------------------------------------ |
| files of the user that the run reaches          | name of the module, SHA-256 of its source  |
| dpjax                                           | its version, SHA-256 of all its sources    |
| JAX, Flax, Optax, NumPy, SciPy, dp_accounting   | their versions                             |
| other packages that the user's files import     | their versions                             |
| a package that was installed from a folder      | the hashes of its RECORD, too              |
| Python and its standard library                 | the version, as 3.11                       |
| what was changed in memory [1]                  | its byte code, or its value                |
| what replaces a function of a library           | the file of the replacement                |
| options of JAX and XLA that set a precision     | their values, where they are not usual     |
| data files that the user's modules read [2]     | SHA-256 of the file                        |
| values that they hold after their import [2]    | SHA-256 of the value                       |
| environment variables that they name [2]        | SHA-256 of the value                       |

[1] In a user's module: a function whose code is not in the source, such as one that `exec` made of
another file; a number or string that the source sets once, to another value.

[2] They may follow from private data, so `Code.inputs` is as secret as the data. It is part of no
public digest, and is stored in checkpoints only.

Why SciPy and dp_accounting: they decide the noise multiplier of an epsilon. The same noise at two
scales reveals the sums, too. Names hold no folder, so two machines with the same code agree.

Which files a run reaches is a function of the run, not of the process. `sys.modules` also holds
what a test, a notebook or a plugin imported by chance. So the search starts at the modules that
the config names. It follows (1) every import statement in their sources, also within functions,
and every module or file that a string constant in them may name; (2) the parts of their functions,
classes and values: closures, defaults, decorated functions, partial arguments. A module
that is not yet imported is found as an import would find it. Its source is read without running it.

A source is read once, when its module is first seen. If the file is edited later, a long process
still runs the module that it has imported, and names the code by that first source. A file that was
edited between its import and the first look is refused, if its compiled file shows the edit.

Loads that no source shows are recorded by an audit hook, for each file of the user (`loaded`). From
each file that the search reaches it follows that file's loads of any kind: computed names,
`exec_module`, `runpy`, plugins, archives, threads, data files.

Code that is loaded or called only after the noise was chosen is refused before a step is written.
`watched` refuses it while a run is built and does its first step, `check_still` after each later
step. docs/release.md lists what is still not seen.
"""

from __future__ import annotations

from dpjax.run_code.loaded import begin_at as begin_at
from dpjax.run_code.loaded import number_of_changes as number_of_changes
from dpjax.run_code.loaded import reading as reading
from dpjax.run_code.packages import DISTRIBUTIONS as DISTRIBUTIONS
from dpjax.run_code.record import Code as Code
from dpjax.run_code.record import check_inputs as check_inputs
from dpjax.run_code.record import check_same as check_same
from dpjax.run_code.search import of as of
from dpjax.run_code.sources import source as source
from dpjax.run_code.watch import check_still as check_still
from dpjax.run_code.watch import watched as watched
