"""Each refusal whose sentence gives advice has it as data too, which `test_advice.py` follows, or is listed here."""

import ast
import pathlib
import re
from collections.abc import Iterator
from typing import NamedTuple

import jaxfb

PACKAGE = pathlib.Path(jaxfb.__file__).parent
REFUSALS = {"Refused", "PlanError", "ConfigError", "ValueError", "Missing", "refuse"}
VERBS = "use|try|choose|make|move|set|give|leave|keep|pass|add|raise|cut|return|call|or|go on|mend|remove|did you mean"
ADVICE = re.compile(f"[;?] ?(?:{VERBS}) ")

NOT_DATA = {
    "another file, text or tokenizer": """
        data/corpus.py::_mixed data/corpus.py::_common_tokenizer data/mixture.py::MixedOrder.continued
        data/tables.py::texts_of data/tables.py::_check_column
        data/chat.py::Chat._pieces data/chat.py::_id_of
        data/chat.py::_unused data/chat.py::make_chat data/conversations.py::_records data/loader.py::_check
        data/shards.py::check_sides
        data/sidecar.py::_check data/sources.py::_lines data/sources.py::_read_text
        data/sources.py::_stdlib_files
        data/sources.py::find_files data/token_files.py::_check_ids data/token_shards.py::_matching_tokenizer
        data/tokenizer.py::load_tokenizer planner/job.py::model_sizes
        pretrained/architectures.py::architecture_of
        rl/start.py::_read_template rl/start.py::_tokenizer rl/supervised.py::work_on
        training/sample.py::_prompt
        trainer.py::_check_tokenizer trainer.py::evaluate
    """,
    "another directory, or the settings of the run that is saved in it": """
        checkpoint.py::CheckpointStore.save config/starter.py::write_starter data/loader.py::Loader.restore
        pretrained/export.py::export_model pretrained/run.py::import_run rl/resume.py::refuse_other_rollout
        rl/work.py::PostTraining.check_same_text training/changes.py::check_changes
        training/changes.py::check_model training/own_rows.py::_Indexed.restore
        training/run_dir.py::RunDirectory._check_kinds training/run_dir.py::RunDirectory.check
        training/run_dir.py::RunDirectory.refuse_unless_free
        training/run_dir.py::RunDirectory.refuse_unless_run
        training/run_lock.py::RunLock.acquire training/session.py::Run._check_newest
        training/session.py::Run._check_sound training/dump.py::read_dump training/loop.py::_check_stop
    """,
    "a flag of the command line": """
        benchmark.py::directory benchmark.py::run checking/command.py::random_check cli.py::_check_random
        cli.py::_launch planner/compiled.py::_mesh planner/search.py::_compiled planner/search.py::_fastest
        
        planner/search.py::search planner/topology.py::parse_topology planner/tpu.py::devices
        schedules/command.py::_check_costs schedules/command.py::_require schedules/command.py::chosen
        schedules/command.py::compared
    """,
    "other processes, devices or slices": """
        mesh.py::_over_slices mesh.py::across_slices mesh.py::make_mesh training/cluster.py::_is_told
        training/cluster.py::_numbered training/hosts.py::_join training/machine.py::check_model
    """,
    "other code of the caller's: a model, a loss, a callback, a table, rows": """
        batch_plan/arrangement.py::_checked_lengths callbacks.py::_check_names checking/problem.py::check_own
        checkpoint.py::_check_writable data/token_rows.py::token_rows
        forward_backward/arguments.py::check_params
        forward_backward/engine.py::ForwardBackward.check_plan forward_backward/engine.py::_check_backward
        forward_backward/engine.py::_check_schedule forward_backward/loss.py::as_loss_output
        forward_backward/microbatches.py::check_leaves forward_backward/packed.py::Packed._restored
        forward_backward/packed.py::Packed.keys forward_backward/packed.py::row_lengths
        forward_backward/pipeline.py::_check_float forward_backward/over_context.py::_is_of_tokens
        forward_backward/weights.py::check_terms 
        hlo/communication.py::traffic hlo/text.py::parse losses/aggregation.py::check_aggregation
        losses/coupling.py::check_rows_uncoupled parallel/context.py::exchanged parallel/context.py::later
        parallel/expert.py::_num_owners parallel/sharding.py::_check_divides rl/sampler.py::Sampler._padded
        rl/tasks.py::check_task schedules/placement.py::channel_of schedules/validate.py::_check_cells
        schedules/validate.py::_check_complete train_arguments.py::check_alive train_arguments.py::check_state
        training/custom.py::make_custom training/own_rows.py::_Indexed.__init__
        training/own_rows.py::_Streamed._next types.py::Sum.__add__ metrics/writers.py::_checked
    """,
    "a plan that is to be made": """
        batch_plan/plan.py::BatchPlan._no_cut batch_plan/plan.py::BatchPlan.require
        batch_plan/plan.py::plans_by_purpose batch_plan/ramp_up.py::RampUp.parse
        batch_plan/rollout.py::RolloutPlan.__post_init__ batch_plan/rollout.py::RolloutPlan.plan
        batch_plan/rollout.py::_check_plans batch_plan/run.py::_check_ramp_up
        forward_backward/arguments.py::check_plan training/machine.py::check_rows
    """,
    "a key or a name, chosen from a list in the sentence": """
        config/root.py::_check_mixture data/mixture.py::Mixture.__post_init__
        config/schema.py::_named_section data/config.py::_check_mixture
        config/schema.py::build metrics/writers.py::check_writers
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
