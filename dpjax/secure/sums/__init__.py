"""Sums of clients' integer vectors, of which the server learns the sum alone."""

from dpjax.secure.sums.interface import Cost as Cost
from dpjax.secure.sums.interface import Drops as Drops
from dpjax.secure.sums.interface import Summed as Summed
from dpjax.secure.sums.interface import SumProtocol as SumProtocol
