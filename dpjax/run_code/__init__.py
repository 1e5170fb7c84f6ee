"""The code of a run, so that edited code never shares noise with the code before the edit.

Two runs with the same noise and different code reveal the exact difference of their clipped sums,
since the difference of their releases holds no noise. So `of` names the code,
`experiments.run.run_keys` binds every key to that name, and a run can be resumed with the same code
only.

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
| values of these modules after their import [2]  | SHA-256 of the value                       |
| environment variables that the modules name [2] | SHA-256 of the value                       |

[1] There are two kinds of such changes in a user's module. The code of a function is not in the
source, for example if `exec` made the function from another file. Or a number or string differs
from the value that the source sets.

[2] These files and values may follow from private data, so `Code.inputs` is as secret as the data.
It is part of no public digest, and is stored in checkpoints only.

SciPy and dp_accounting are listed because they decide the noise multiplier for an epsilon. The same
noise at two scales reveals the sums, too. Names of code contain no folder, so two machines with the
same code get the same names.

The files that a run reaches depend on the run, not on the process. `sys.modules` also holds
modules that a test, a notebook or a plugin imported by chance. So the search starts at the modules
that the config names. It follows (1) every import statement in their sources, also within
functions; (2) every module or file that a string constant in these sources may name; (3) the parts
of the modules' functions, classes and values: closures, defaults, decorated functions, partial
arguments. A module that is not yet imported is found as an import would find it. Its source is read
without running it.

A source is read once, when its module is first seen. If the file is edited later, a long process
still runs the module that it has imported, and names the code by that first source. A file that was
edited between its import and the first look is refused, if its compiled file shows the edit.

An audit hook (`loaded`) records which files each user's file loads, even if no source shows this:
by computed names, `exec_module`, `runpy`, plugins, archives, threads, or as data. From each file
that the search reaches, it follows these loads.

Code that is loaded or called only after the noise was chosen is refused before a step is written.
`watched` refuses such code while a run is built and does its first step. After each later step,
`check_still` refuses code that the step loaded. docs/release.md lists the code that these checks
miss.
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
