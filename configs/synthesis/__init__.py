"""Configs of `launch.synthesize`: MNIST, and a quickstart."""
