"""Configs of `launch.distill`: MNIST, and a quickstart."""
