"""jaxfb: the forward-backward engine for training transformers with JAX, and a trainer around it.

The public names, in the order of the story; each is loaded when it is first used.
"""

from importlib import import_module

_PUBLIC = {
    # contracts, axes, arithmetic
    "Sum": "types",
    "Max": "types",
    "Min": "types",
    "Last": "types",
    "LossOutput": "types",
    "Pipelined": "types",
    "ForwardBackwardOutput": "types",
    "make_mesh": "mesh",
    "BatchPlan": "batch_plan",
    "RunPlan": "batch_plan",
    "RolloutPlan": "batch_plan",
    # forward and backward
    "get_forward_backward_func": "forward_backward",
    "Microbatches": "forward_backward",
    "check_equivalence": "forward_backward.equivalence",
    "from_megatron": "losses.megatron",
    # post-training
    "policy_loss_fn": "losses.heads",
    "log_prob_fn": "losses.heads",
    "PolicyLoss": "losses.policy",
    "value_loss_fn": "losses.value",
    "value_fn": "losses.value",
    "ValueLoss": "losses.value",
    "PreferenceLoss": "losses.preference",
    "SFTLoss": "losses.sft",
    "distillation_loss_fn": "losses.distillation",
    "DistillationLoss": "losses.distillation",
    # one update
    "make_optimizer": "optim",
    "lr_schedule": "optim",
    "DynamicLossScale": "optim",
    "StaticLossScale": "optim",
    "make_train_step": "train_step",
    "TrainState": "train_step",
    "StepMetrics": "train_step",
    # a whole run
    "Callback": "callbacks",
    "callback": "callbacks",
    "load_config": "config",
    "post_train": "rl",
    "train": "trainer",
}

__version__ = "0.1.0"
__all__ = [*_PUBLIC]


def __getattr__(name: str):
    if name in _PUBLIC:
        return getattr(import_module(f"jaxfb.{_PUBLIC[name]}"), name)
    try:
        return import_module(f"jaxfb.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"jaxfb.{name}":
            raise
        raise AttributeError(f"jaxfb has no public name {name!r}; it has {', '.join(__all__)}") from None


def __dir__():
    return sorted(__all__)
