"""Defines pipeline schedules as data, in pure Python without jax.

`make(name, num_stages, num_microbatches, num_chunks)` gives a `Schedule`, which can be validated, simulated,
printed and drawn without a device, and whose `.program` is what the pipeline executor scans over.
"""

from jaxfb.schedules.action import Action
from jaxfb.schedules.by_name import NAMES, check_name, make
from jaxfb.schedules.compare import ComparisonRow, comparison, comparison_table
from jaxfb.schedules.draw import chrome_trace, timeline_figure
from jaxfb.schedules.kinds import KINDS, Kind, default_name, kind_of, schedule_kind
from jaxfb.schedules.megatron import MegatronRank, megatron_order, megatron_time
from jaxfb.schedules.phases import Phase
from jaxfb.schedules.program import Program
from jaxfb.schedules.simulate import Simulation
from jaxfb.schedules.slots import Slots
from jaxfb.schedules.table import Schedule

__all__ = [
    "KINDS",
    "NAMES",
    "Action",
    "ComparisonRow",
    "Kind",
    "MegatronRank",
    "Phase",
    "Program",
    "Schedule",
    "Simulation",
    "Slots",
    "check_name",
    "chrome_trace",
    "comparison",
    "comparison_table",
    "default_name",
    "kind_of",
    "make",
    "megatron_order",
    "megatron_time",
    "schedule_kind",
    "timeline_figure",
]
