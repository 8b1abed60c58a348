# The public names, in the order in which a step uses them. This is their only list: `__init__.py` loads a name from
# the module given here when it is first used, and editors and type checkers read the same lines.

from . import batch_plan, schedules
from .batch_plan import BatchPlan, RolloutPlan, RunPlan
from .callbacks import Callback, callback
from .checking.at_hand import check_random
from .config import load_config
from .forward_backward import Microbatches, get_forward_backward_func
from .forward_backward.equivalence import check_equivalence
from .losses.distillation import DistillationLoss, distillation_loss_fn
from .losses.heads import log_prob_fn, policy_loss_fn
from .losses.megatron import from_megatron
from .losses.policy import PolicyLoss
from .losses.preference import PreferenceLoss
from .losses.sft import SFTLoss
from .losses.value import ValueLoss, value_fn, value_loss_fn
from .mesh import make_mesh
from .optim import DynamicLossScale, StaticLossScale, lr_schedule, make_optimizer
from .output import ForwardBackwardOutput
from .rl import post_train
from .trainer import Trainer, train
from .types import Last, LossOutput, Max, Min, Pipelined, Sum
from .update.train_state import StepMetrics, TrainState
from .update.train_step import make_train_step

__version__: str
__all__ = [
    # contracts, axes, arithmetic
    "Sum",
    "Max",
    "Min",
    "Last",
    "LossOutput",
    "Pipelined",
    "ForwardBackwardOutput",
    "make_mesh",
    "BatchPlan",
    "RunPlan",
    "RolloutPlan",
    # forward and backward
    "get_forward_backward_func",
    "Microbatches",
    "check_equivalence",
    "check_random",
    "from_megatron",
    "schedules",
    "batch_plan",
    # post-training
    "policy_loss_fn",
    "log_prob_fn",
    "PolicyLoss",
    "value_loss_fn",
    "value_fn",
    "ValueLoss",
    "PreferenceLoss",
    "SFTLoss",
    "distillation_loss_fn",
    "DistillationLoss",
    # one update
    "make_optimizer",
    "lr_schedule",
    "DynamicLossScale",
    "StaticLossScale",
    "make_train_step",
    "TrainState",
    "StepMetrics",
    # a whole run
    "Callback",
    "callback",
    "load_config",
    "post_train",
    "train",
    "Trainer",
]
