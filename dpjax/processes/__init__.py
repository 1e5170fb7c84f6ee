"""Several processes as one run: how they meet, what they tell each other, how one is missed."""

from dpjax.processes.exchanges import PeerLost as PeerLost
from dpjax.processes.exchanges import arrays_from_first as arrays_from_first
from dpjax.processes.exchanges import exchange as exchange
from dpjax.processes.exchanges import is_first as is_first
from dpjax.processes.exchanges import largest as largest
from dpjax.processes.exchanges import on_first as on_first
from dpjax.processes.exchanges import same as same
from dpjax.processes.spanning import own_copy as own_copy
from dpjax.processes.spanning import placed as placed
from dpjax.processes.spanning import placed_like as placed_like
