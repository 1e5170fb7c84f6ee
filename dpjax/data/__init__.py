"""Data sets as NumPy arrays with random access, which Poisson sampling needs.

`load` reads a named data set, `from_arrays` takes your own; both give a `Dataset`, and
`dataset[indices]` is a `dpjax.types.Example` batch. A `Federation` says which rows belong to
which client; `partition` makes them, `shakespeare_federation` has natural ones. Nothing here
looks at the values to choose a transformation: see `preprocess` for why, and for what is
offered instead.
"""

from dpjax.data import partition as partition
from dpjax.data import preprocess as preprocess
from dpjax.data.dataset import Dataset as Dataset
from dpjax.data.dataset import from_arrays as from_arrays
from dpjax.data.federation import Federation as Federation
from dpjax.data.identity import computed as computed
from dpjax.data.identity import digest as digest
from dpjax.data.registry import load as load
from dpjax.data.resident import resident as resident
from dpjax.data.shakespeare import shakespeare_federation as shakespeare_federation
from dpjax.data.text import PADDING_ID as PADDING_ID
from dpjax.data.text import encode_text as encode_text
