"""Central training: algorithms as (init, step) pairs."""

from dpjax.training.augment import AUGMENTATIONS as AUGMENTATIONS
from dpjax.training.augment import augmented as augmented
from dpjax.training.dp_sgd import StepInfo as StepInfo
from dpjax.training.dp_sgd import TrainState as TrainState
from dpjax.training.dp_sgd import clip_scale as clip_scale
from dpjax.training.dp_sgd import dp_sgd as dp_sgd
from dpjax.training.dp_sgd import eval_params as eval_params
from dpjax.training.dp_sgd import noise_state as noise_state
from dpjax.training.lora import Lora as Lora
from dpjax.training.lora import lora as lora
