"""Each refusal whose sentence gives advice has it as data too, which `test_advice.py` follows, or is listed here."""

import ast
import pathlib
import re
from collections.abc import Iterator
from typing import NamedTuple

import jaxfb

PACKAGE = pathlib.Path(jaxfb.__file__).parent
REFUSALS = {"Refused", "PlanError", "ConfigError", "ValueError", "Missing", "refuse"}
ADVICE = re.compile("[;?] ?(?:or )?(?:use|try|set|choose|did you mean) ")
"""How a sentence proposes a value."""

NOT_DATA = {
    "another file, text or tokenizer": """
        config/post_training.py::ItemsConfig.__post_init__
        data/chat.py::Chat._refuse_unmarked data/chat.py::_id_of data/corpus.py::_common_tokenizer
        data/mixture.py::MixedOrder.continued data/stored/sidecar.py::_check data/sources.py::_stdlib_files
        data/tables.py::_check_column data/stored/token_files.py::_check_ids
        data/stored/token_shards.py::_matching_tokenizer data/tokenizer.py::load_tokenizer
        pretrained/architectures.py::architecture_of rl/start.py::_read_template rl/start.py::tokenizer_of
        trainer.py::_check_tokenizer
    """,
    "another directory, or the settings of the run that is saved in it": """
        checkpoint/store.py::CheckpointStore.save data/loader.py::Loader.restore
        pretrained/new_directory.py::check_new
        rl/resume.py::refuse_ids_without_probability
        rl/work.py::PostTraining.check_same_text training/persistence/changes.py::check_changes
        training/guarding/dump.py::read_dump training/loop.py::_check_stop training/rows/own_rows.py::_Indexed.restore
        training/rows/own_rows.py::_Indexed.check_same training/rows/own_rows.py::_Mixed.check_same
        training/rows/own_rows.py::_check_kind training/run_dir.py::RunDirectory.check
        training/run_dir.py::RunDirectory.refuse_unless_free
        training/run_dir.py::RunDirectory.refuse_unless_run
        training/persistence/resume.py::CheckpointSources._check_newest
    """,
    "a flag of the command line": """
        cli/bench.py::_without_parser cli/bench.py::directory cli/checks.py::chaos cli/training.py::launch
        chaos/command.py::_check_reference chaos/runs.py::Laboratory.reference
        config/load.py::load_config config/reference.py::reference
        config/starter.py::_make_directory
        planner/compiled.py::_mesh planner/compiled.py::_run_child
        planner/search.py::_no_layout planner/search.py::search
        planner/topology.py::parse_topology planner/tpu.py::devices process/fault_points.py::_place
        schedules/command.py::_check_costs schedules/command.py::_required
        training/hugging_face.py::_step_of
    """,
    "other processes, devices or slices": """
        mesh.py::make_mesh training/job/cluster.py::_numbered training/machine.py::check_model
        training/machine.py::check_sampler training/machine.py::check_table
    """,
    "other code of the caller's: a model, a loss, a callback, a table, rows": """
        callbacks.py::_check_names forward_backward/engine.py::ForwardBackward.check_plan
        forward_backward/packed.py::Packed.keys forward_backward/packed.py::row_lengths
        forward_backward/resolved.py::layout_for
        inference/harness.py::HarnessModel._continuation
        losses/aggregation.py::check_aggregation losses/coupling.py::check_rows_uncoupled
        parallel/context.py::exchanged parallel/context.py::later parallel/set_mesh.py::entered
        schedules/placement.py::channel_of update/extra_arguments.py::updated
        schedules/validate.py::_check_cells update/arguments.py::check_alive training/custom.py::make_custom
    """,
    "a plan that is to be made": """
        batch_plan/plan.py::BatchPlan._no_cut batch_plan/rollout.py::_check_plans
    """,
    "a key or a name, chosen from a list in the sentence": """
        config/root.py::_check_mixture config/root.py::_with_tokenizer
        config/schema.py::_named_section config/schema.py::build data/config.py::_check_mixture
        data/config.py::check_shares data/mixture.py::Mixture.__post_init__ metrics/writers.py::check_writers
    """,
}
"""What the advice asks for that no change of an argument would give, and the functions that give such advice."""


class Site(NamedTuple):
    """A place in the source where a refusal is made. text: the constant parts of its sentence."""

    place: str
    text: str
    has_choices: bool


def sites() -> Iterator[Site]:
    """Yields every refusal of the package; a place is file::function."""
    for file in sorted(PACKAGE.rglob("*.py")):
        yield from _below(ast.parse(file.read_text()), file.relative_to(PACKAGE).as_posix(), "")


def _below(node: ast.AST, file: str, function: str) -> Iterator[Site]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            yield from _below(child, file, f"{function}.{child.name}" if function else child.name)
            continue
        called = getattr(child, "func", None)
        name = getattr(called, "id", getattr(called, "attr", None))
        if name in REFUSALS:
            parts = [one.value for one in ast.walk(child) if isinstance(one, ast.Constant)]
            text = " ".join(part for part in parts if isinstance(part, str))
            data = (
                name != "refuse" and len(child.args) > 1 or "choices" in {one.arg for one in child.keywords}
            )
            yield Site(f"{file}::{function}", text, data)
        else:
            yield from _below(child, file, function)


def test_advice_is_data_unless_no_argument_can_follow_it():
    given = {site.place for site in sites() if ADVICE.search(site.text) and not site.has_choices}
    listed = [place for places in NOT_DATA.values() for place in places.split()]
    assert len(listed) == len(set(listed))
    assert not given - set(listed)
