"""Checks of the parts of a private training, before it is trusted: `dpjax.check`."""
