"""A training config: read a YAML file, apply overrides, refuse whatever is not legal. No jax is imported.

Comes before all other steps. `load_config("configs/quickstart.yaml", ["mesh.dp=2"])` gives one frozen tree of
sections (`sections.py`); every refusal is a ValueError of one sentence that names the full key.
"""

from jaxfb.config.custom import CustomConfig, refuse_own_model
from jaxfb.config.load import config_from_dict, kind_of_command, load_config, saved_run
from jaxfb.config.post_training import DPOConfig, RLConfig, SFTConfig
from jaxfb.config.root import Config
from jaxfb.config.schema import ConfigError
from jaxfb.config.show import as_yaml, changed_keys, config_to_dict, save_yaml, table
from jaxfb.config.smoke import smoke_overrides
from jaxfb.config.starter import described_starters, starter_names, write_starter

__all__ = [
    "Config",
    "ConfigError",
    "CustomConfig",
    "DPOConfig",
    "RLConfig",
    "SFTConfig",
    "as_yaml",
    "changed_keys",
    "config_from_dict",
    "config_to_dict",
    "described_starters",
    "kind_of_command",
    "load_config",
    "refuse_own_model",
    "save_yaml",
    "saved_run",
    "smoke_overrides",
    "starter_names",
    "table",
    "write_starter",
]
