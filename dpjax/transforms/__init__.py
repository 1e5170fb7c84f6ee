"""The Optax face of dpjax. Each transform only composes pieces of gradients/ and noise/."""

from dpjax.transforms.clip_and_noise import clip_and_noise as clip_and_noise
