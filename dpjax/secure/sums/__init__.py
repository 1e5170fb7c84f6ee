"""Sums of clients' integer vectors, of which the server learns the sum alone."""
