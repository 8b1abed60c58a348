"""A config is read whole or refused in one sentence that names the key and the nearest legal choice."""

import json
import subprocess
import sys
from dataclasses import fields
from functools import partial
from pathlib import Path
from types import UnionType
from typing import Union, get_args, get_origin, get_type_hints

import optax
import pytest

from jaxfb import BatchPlan, get_forward_backward_func, make_train_step, schedules
from jaxfb.config import ConfigError, as_yaml, config_from_dict, config_to_dict, load_config, save_yaml, table
from jaxfb.config.fields import all_keys
from jaxfb.config.load import _parse
from jaxfb.config.names import ALIASES, POLICY_SYNONYMS, SYNONYMS
from jaxfb.config.post_training import COMMANDS, RLConfig
from jaxfb.config.root import Config
from jaxfb.config.sections import BatchConfig, LearningRateConfig, OptimizerConfig, ParallelConfig
from jaxfb.shared_options import LayoutOptions, PrecisionOptions

CONFIGS = Path(__file__).parents[2] / "configs"
QUICKSTART = CONFIGS / "quickstart.yaml"

REFUSED = [
    ("model.hiden_size=3", r"unknown key model\.hiden_size; did you mean model\.hidden_size\?"),
    ("optimizer.lr=1", r"unknown key optimizer\.lr; did you mean optimizer\.learning_rate\?"),
    ("lr=1e-3", r"lr=0\.001 must be a section .* did you mean optimizer\.learning_rate=0\.001\?"),
    ("lr=cosin", r"lr='cosin' must be a section .* did you mean lr\.name=cosine\?"),
    ("optimizer=adamm", r"optimizer='adamm' must be a section .* did you mean optimizer\.name=adamw\?"),
    ("optimizer=7", r"optimizer=7 must be a section with learning_rate, .*, memory"),
    ("mesh.stage=2", r"did you mean mesh\.pipe\?"),
    ("hidden_size=3", r"unknown key hidden_size; did you mean model\.hidden_size\?"),
    ("remainder=drop", r"unknown key remainder; did you mean batch\.remainder or run\.remainder\?"),
    ("run.foo=1", r"unknown key run\.foo; choose one of run\.dir, run\.seed, .*"),
    ("run.updates=many", r"run\.updates='many' must be an integer or null"),
    ("batch.rows=true", r"batch\.rows=true must be an integer"),
    ("batch.rows=2.0", r"batch\.rows=2\.0 must be an integer"),
    ("optimizer.learning_rate=.inf", r"optimizer\.learning_rate=inf must be a finite number"),
    ("lr.options={clamp: .inf}", r"lr\.options\.clamp=inf must be a finite number"),
    ("optimizer.name=adamv", r"must be one of adamw, .*; did you mean adamw\?"),
    ("log.writers=[wanb]", r"log\.writers=\['wanb'\] must be a list, each one of tensorboard, wandb"),
    (
        "schedule=1f1b",
        r" schedule=1f1b is a setting of a pipeline, but mesh\.pipe=1; use mesh\.pipe=2, or leave it out",
    ),
    (
        "model=my_model:loss",
        r"model='my_model:loss' must be a section with num_layers, hidden_size and so on; a model of",
    ),
    ("optimizer.name=LION", r"did you mean lion\?"),
    ("mesh.model=2", r"did you mean mesh\.tensor\?"),
    ("mesh.tensor_parallel=2", r"did you mean mesh\.tensor\?"),
    ("pipeline_model_parallel_size=2", r"did you mean mesh\.pipe\?"),
    ("run.updates=1e3", r"run\.updates=1000\.0 must be an integer or null; did you mean 1000\?"),
    ("batch.rows='8'", r"batch\.rows='8' must be an integer; did you mean 8\?"),
    ("trainable=head", r"trainable='head' must be a list, .*; did you mean \[head\]\?"),
    ("trainable=*.bias", r"trainable='\*\.bias' must be a list, .*; did you mean \[\"\*\.bias\"\]\?"),
    ("log.writers=none", r"must be a list, each one of tensorboard, wandb, .*:attribute'$"),
    ("tp=2", r"unknown key tp; did you mean mesh\.tensor\?"),
    ("run.dir=a\nb", r"\[run\] dir='a\\nb' must be of printable characters; use runs/NAME"),
    ("eval.prompt=a\udcff", r"\[config\] eval\.prompt must be text in UTF-8, got 'a\\udcff'"),
    ('data.path="\\ud800"', r"\[config\] data\.path must be text in UTF-8, got '\\ud800'"),
    ("optimizer=learning_rate:1e-3", r"did you mean learning_rate: 1e-3 \(with a colon and a space\)\?"),
    ("model={name: llama, num_layers: 2}", r"model\.name='llama' must be one of transformer, or your own"),
    (
        "model={name: 'os:getcwd', num_layers: 2}",
        r"model\.num_layers is not a key of a model with model\.name='os:getcwd'; it has name, options, vocab_size",
    ),
    ("mesh.tp=-1", r"only one size may be -1 .* data, tensor; give mesh\.data a number"),
    ("run.epochs=2", r"exactly one .* set run\.updates=null or run\.epochs=null"),
    ("lr.final=1", r"\[lr\] final=1.0 is above optimizer\.learning_rate"),
    ("lr.warmup=1000000", r"\[lr\] warmup=1000000 must be below the \d+ updates it is part of"),
    ("model.num_heads=5", r"\[model\] hidden_size=.* multiple of num_heads=5"),
    ("checkpoint.keep=0", r"\[checkpoint\] keep=0 must be positive and finite; use 1"),
    ("optimizer.b1=0.9", r"did you mean optimizer\.options\.b1\?"),
    ("adam_beta2=0.9", r"did you mean optimizer\.options\.b2\?"),
    ("data.seq_len=128", r"did you mean data\.sequence_length\?"),
    ("batch.size=128", r"did you mean batch\.rows\?"),
    ("run.updates=010", r"run\.updates='010' must be an integer"),
    ("run.updates=1:30", r"run\.updates='1:30' must be an integer"),
    ("optimizer.learning_rate=1:30.5", r"optimizer\.learning_rate='1:30\.5' must be a number"),
    ("guard.spikes=on", r"guard\.spikes=true must be one of off, warn, skip, rollback"),
    ("noequals", r"write key\.path=value"),
    ("mesh=atuo", r"must be sizes, such as mesh\.fsdp=8, or the word auto"),
    ("data.path=", r"\[data\] path=.* has an empty path; use path=\[\] for none"),
    ("data.cache_dir=", r"\[data\] cache_dir='' must not be empty; use data\.cache_dir=null"),
    ("parallel.layers_per_stage=[]", r"layers_per_stage=\[\] has no stage; use layers_per_stage=null"),
]


@pytest.mark.parametrize("override, sentence", REFUSED, ids=[override for override, _ in REFUSED])
def test_refusals_name_the_key_and_the_nearest(override, sentence):
    with pytest.raises(ValueError, match=sentence) as refusal:
        load_config(QUICKSTART, [override])
    assert "\n" not in str(refusal.value)


OF_POST_TRAINING = [
    ("mesh=auto", r"mesh=auto is for `jaxfb train` and `jaxfb plan` of a built-in model; .* mesh\.data=-1"),
    ("mesh=atuo", r"mesh='atuo' must be sizes, such as mesh\.data=-1"),
    ("conversations.path=", r"\[conversations\] path='' must not be empty; use the path of a \.jsonl file"),
    (
        "conversations.held_out_path=",
        r"held_out_path='' must not be empty; use conversations\.held_out_path=null",
    ),
    ("start.tokenizer=", r"\[start\] tokenizer='' must not be empty; use start\.tokenizer=null"),
    ("plans.train.widths=[]", r"widths=\[\] has no row length .* widths=null"),
]


@pytest.mark.parametrize("override, sentence", OF_POST_TRAINING, ids=[one for one, _ in OF_POST_TRAINING])
def test_refusals_of_post_training_name_the_key_and_the_nearest(override, sentence):
    with pytest.raises(ValueError, match=sentence):
        load_config("sft", [override])


def test_a_mixture_of_nothing_does_not_train_on_another_text():
    """Beside a named source it stays legal: the saved config of every run without a mixture has one."""
    values = config_to_dict(load_config(QUICKSTART))
    assert values["data"]["mixture"] == {} and config_from_dict(values) == load_config(QUICKSTART)
    with pytest.raises(
        ValueError, match=r"mixture=\{\} has no source.* data\.mixture\.notes=.* data\.source="
    ):
        config_from_dict({**values, "data": {"mixture": {}}})
    config_from_dict(
        {**values, "data": {"mixture": {"notes": {"weight": 1.0, "source": "text", "path": "a"}}}}
    )


def test_a_word_that_yaml_takes_for_false_is_the_word(tmp_path):
    path = tmp_path / "off.yaml"
    path.write_text(QUICKSTART.read_text() + "\nguard:\n  spikes: off\n")
    assert load_config(path).guard.spikes == "off"
    assert load_config(QUICKSTART, ["guard.spikes=off"]).guard.spikes == "off"


def test_a_file_may_have_the_short_names_of_axes(tmp_path):
    path = tmp_path / "short.yaml"
    path.write_text(QUICKSTART.read_text() + "\nmesh: {dp: 2, tp: 4}\n")
    mesh = load_config(path, ["mesh.dp=3"]).mesh
    assert (mesh.data, mesh.tensor) == (3, 4)
    path.write_text(QUICKSTART.read_text() + "\nmesh: {dp: 2, data: 2}\n")
    with pytest.raises(ConfigError, match=r"mesh\.dp and mesh\.data are one key; leave mesh\.dp out"):
        load_config(path)


@pytest.mark.parametrize(
    "text, value", [("1_000", 1000), ("0x10", 16), ("1e3", 1000.0), ("-1.5", -1.5), (".5", 0.5), ("0", 0)]
)
def test_numbers_of_yaml(text, value):
    read = _parse(f"a: {text}", "here")["a"]
    assert (read, type(read)) == (value, type(value))


@pytest.mark.parametrize(
    "text", ["1e3", "-.5E+3", "1e400", "1_0", "0o7", "yes", "~", "", " a", "a\nb", "a: b", "\xe9"]
)
def test_a_saved_config_has_the_same_strings(tmp_path, text):
    """Our YAML reads numbers that PyYAML writes as bare words."""
    values = config_to_dict(load_config(QUICKSTART))
    values["eval"]["prompt"] = text
    config = config_from_dict(values)
    save_yaml(config, tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml") == config
    assert _parse(as_yaml(text), "shown") == text and "\n" not in as_yaml(text)


def test_lists_and_sections_are_shown_as_they_may_be_given_again():
    kinds = "model.pattern=[{window: 4}, {window: 8}, {rope: false}]"
    config = load_config(QUICKSTART, [kinds, "data.source=text", "data.path=['*.md', 'a,b', '1e3']"])
    shown = [f"{key}={as_yaml(value)}" for key, value in table(config) if isinstance(value, list) and value]
    assert "data.path=['*.md', 'a,b', '1e3']" in shown and any("window: null" in one for one in shown)
    assert load_config(QUICKSTART, ["data.source=text", *shown]) == config


def test_a_section_as_one_override_may_have_the_short_names_of_axes():
    assert load_config(QUICKSTART, ["mesh={dp: 1, tp: 2}"]).mesh.tensor == 2
    assert load_config(QUICKSTART, ["mesh={dp: 1, tp: 2}", "mesh.tp=4", "mesh.data=3"]).mesh.tensor == 4
    with pytest.raises(ConfigError, match=r"mesh\.tp and mesh\.tensor are one key"):
        load_config(QUICKSTART, ["mesh={tp: 2, tensor: 4}"])


def test_overrides():
    overrides = ["mesh.pp=4", "schedule=1f1b", "optimizer.options.b2=0.99", "run.dir=2024-01-01", "mesh.tp=2"]
    overrides += [
        "data.source=text",
        "data.path=*.txt",
        "optimizer.learning_rate=5e-3",
        "eval.prompt=class A ",
        "model.vocab_size=null",
    ]
    config = load_config(QUICKSTART, [*overrides, "log.writers=[tensorboard]", "precision.loss_scale=1024"])
    assert (config.mesh.pipe, config.mesh.tensor, config.schedule) == (4, 2, "1f1b")
    assert config.optimizer.options == {"b2": 0.99} and config.optimizer.learning_rate == 0.005
    assert (config.run.dir, config.eval.prompt) == ("2024-01-01", "class A ")
    assert config.log.writers == ("tensorboard",) and config.precision.loss_scale == 1024.0
    assert (
        config.data.path == ("*.txt",)
        and config.model.vocab_size is None
        and config.model.sized(300).vocab_size == 300
    )


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_configs(path, tmp_path):
    lines = path.read_text().splitlines()
    config = load_config(path)
    command = COMMANDS.get(type(config), "train")
    assert f"jaxfb {command} configs/{path.name}" in lines[0] and lines[0].startswith("# ")
    assert lines[1].startswith("# ") and len(lines) < 70
    assert config_from_dict(config_to_dict(config)) == config
    save_yaml(config, tmp_path / "config.yaml")
    assert load_config(tmp_path) == config
    assert {key for key, _ in table(config)} <= {*all_keys(type(config)), *_option_keys(config)}


def _option_keys(config):
    for section in {"optimizer", "lr", "policy"} & vars(config).keys():
        yield from (f"{section}.options.{name}" for name in getattr(config, section).options)


@pytest.mark.parametrize(
    "text, sentence",
    [
        ("model: {num_layers: 1}\nmodel: {}", r"bad\.yaml line 2: model is given twice"),
        ("a: &x 1\nb: *x", r"bad\.yaml line 2: aliases"),
        ("a: *.txt", r"bad\.yaml line 1: expected .*; put quotes around a string that begins with \*$"),
        ("model:\n  - [", r"bad\.yaml line 2"),
        ("model:\n\tnum_layers: 1", r"bad\.yaml line 2: .*; indent with spaces, not tabs"),
        ("model:\n  num_layers: 1\n   num_heads: 2", r"bad\.yaml line 3: .*; check the indentation"),
        ("model: {num_layers: 1}", r"model\.hidden_size, model\.num_heads must be given; add them"),
        (
            "data: {}\nbatch: {rows: 1, num_microbatches: 1}\nrun: {dir: a, updates: 1}\noptimizer: {learning_rate: 1}",
            r"model must be given; add it to",
        ),
        ("log: {every: 1}", r"model, data, batch, run, optimizer must be given"),
        ("3", "must contain sections such as model, data"),
        ("a: 1\n---\nb: 2", r"bad\.yaml line 2: but found another document; a file holds one config$"),
        ("run:\n  <<: {seed: 3}", r"bad\.yaml line 2: .*; merged keys \(<<\) are not supported$"),
        ("run: {dir: 12, updates: 1}", r"run\.dir=12 must be a string; put quotes around it$"),
        ("run: {dir: yes, updates: 1}", r"run\.dir=true must be a string; put quotes around it$"),
        (
            "model.num_layers: 2",
            r"model\.num_layers is the name on the command line; write model: \{num_layers: \.\.\.\}",
        ),
        (
            "model: {variant.norms: pre}",
            r"model\.variant\.norms is the name on the .*; write variant: \{norms: \.\.\.\}",
        ),
        ("- !!python/object/apply:os.system ['true']", r"line 1: could not determine a constructor"),
        pytest.param("#" * 2**20 + "\n", "a config has at most 1048576", id="too long"),
    ],
)
def test_bad_files(tmp_path, text, sentence):
    (tmp_path / "bad.yaml").write_text(text)
    with pytest.raises(ValueError, match=sentence):
        load_config(tmp_path / "bad.yaml")


def test_missing_file_names_the_nearest():
    with pytest.raises(ValueError, match=r"did you mean .*quickstart\.yaml\?"):
        load_config(CONFIGS / "quikstart.yaml")


def test_a_checkpoint_in_place_of_its_run_is_refused_with_the_run(tmp_path):
    (tmp_path / "checkpoints" / "4").mkdir(parents=True)
    with pytest.raises(
        ValueError,
        match=rf"is a checkpoint of the run {tmp_path}; give {tmp_path}, whose newest .* --update 4",
    ):
        load_config(tmp_path / "checkpoints" / "4")


def test_hints_point_at_keys_that_exist():
    assert {*ALIASES.values(), *SYNONYMS.values()} <= set(all_keys(Config))
    assert set(POLICY_SYNONYMS.values()) <= set(all_keys(RLConfig))


def names(section, field):
    hint = get_type_hints(section, include_extras=True)[field]
    hint = get_args(hint)[0] if get_origin(hint) in (Union, UnionType) else hint
    return set(hint.__metadata__[0].names if hasattr(hint, "__metadata__") else get_args(hint))


def refused_with(function, *args, **kwargs):
    """The legal names that a function offers for an illegal one."""
    with pytest.raises(ValueError, match="; .*, ") as refusal:
        function(*args, **kwargs)
    return {words.split()[-1] for words in str(refusal.value).rpartition("; ")[2].split(", ")}


def test_enumerated_names_are_those_of_the_code():
    from jaxfb.batch_plan.plan import REMAINDERS
    from jaxfb.gradients import check_clipping
    from jaxfb.optim import lr_schedule, make_optimizer
    from jaxfb.recomputation import GATHERS, REMAT_POLICIES
    from jaxfb.shared_options import NORMALIZATIONS

    assert names(OptimizerConfig, "name") == refused_with(make_optimizer, "", learning_rate=1)
    assert names(LearningRateConfig, "name") == refused_with(lr_schedule, "", peak=1)
    linear = dict(peak=1, total=9)
    assert names(LearningRateConfig, "warmup_shape") == refused_with(
        lr_schedule, "linear", warmup_shape="", **linear
    )
    assert names(LearningRateConfig, "unit") == refused_with(lr_schedule, "linear", unit="", **linear)
    assert names(BatchConfig, "remainder") == set(REMAINDERS)
    assert names(BatchConfig, "normalize") == set(NORMALIZATIONS)
    assert names(ParallelConfig, "remat") == set(REMAT_POLICIES)
    assert names(ParallelConfig, "fsdp_gather") == set(GATHERS)
    for convention in names(OptimizerConfig, "clip"):
        check_clipping(1.0, convention)


def test_every_shared_option_reaches_the_engine():
    """Each with a value that is not its default, from YAML to `EngineOptions`."""
    from jaxfb.forward_backward.options import EngineOptions
    from jaxfb.training.from_config.options import engine_options

    given = {
        "precision.compute_dtype": ("bfloat16", "compute_dtype"),
        "precision.accum_dtype": ("float64", "accum_dtype"),
        "precision.reduce_dtype": ("bfloat16", "reduce_dtype"),
        "parallel.remat": ("full", "remat"),
        "parallel.fsdp_gather": ("step", "fsdp_gather"),
        "parallel.gather_ahead": ("half", "gather_ahead"),
        "parallel.overlap_grad_reduce": (False, "overlap_grad_reduce"),
        "parallel.compiler_options": ({"xla_a": None}, "compiler_options"),
        "parallel.head_placement": ("rows", "head_placement"),
        "parallel.layers_per_stage": ((4, 2, 1, 1), "layers_per_stage"),
        "parallel.pieces": (2, "num_pieces"),
        "optimizer.sharding": ("data", "optimizer_sharding"),
        "schedule": ("seq1f1b", "schedule"),
        "chunks": (2, "num_chunks"),
    }
    shared = {option.name for part in (LayoutOptions, PrecisionOptions) for option in fields(part)}
    assert shared <= {name for _, name in given.values()}
    overrides = [f"{key}={json.dumps(value)}" for key, (value, _) in given.items()]
    options = EngineOptions(**engine_options(load_config(QUICKSTART, ["mesh.pipe=2", *overrides])))
    for value, name in given.values():
        wanted = (("xla_a", None),) if name == "compiler_options" else value
        assert getattr(options, name) == wanted != getattr(EngineOptions(), name), name


def test_nothing_heavy_is_imported():
    code = "import sys; from jaxfb.config import load_config; load_config(sys.argv[1]); print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code, QUICKSTART], capture_output=True, text=True, check=True
    )
    heavy = {"jax", "flax", "optax", "orbax", "grain", "tokenizers", "matplotlib", "rich"}
    assert not heavy & set(done.stdout.split())


@pytest.mark.parametrize(
    "override, message",
    [
        ("rollout.ppo_micro_batch_size_per_gpu=3", "did you mean plans.train.rows_per_microbatch?"),
        ("rollout.ppo_mini_batch_size=3", "did you mean rollout.rows_per_update?"),
        ("policy.loss_agg_mode=token-mean", "did you mean policy.aggregation?"),
        ("plans.train.packing=1", "plans.train.packing=1 must be true or false"),
        ("advantage.name=gae", "[advantage] name=gae needs a critic; add a section critic"),
        ("start.run=runs/x", "give model, for random parameters, or start.run, for those of a run; got both"),
        (
            "advantage.gamma=0.9",
            "[advantage] gamma=0.9 is not read by name=grpo; use advantage.gamma=1.0, or another",
        ),
        ("advantage.whiten=false", "[advantage] whiten=False is not read by name=grpo"),
        ("task.reward=package:function", "unknown key task.reward; choose one of task.name, task.digits"),
        ("rollout.log_probs=sampler", None),
    ],
)
def test_keys_of_a_policy_run(override, message):
    path = CONFIGS / "grpo_arithmetic.yaml"
    if message is None:
        assert isinstance(load_config(path, [override]), RLConfig)
        return
    with pytest.raises(ValueError) as caught:
        load_config(path, [override])
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "override, message",
    [
        (
            "preferences.reference_free=true",
            r"unknown key preferences\.reference_free; choose one of preferences\.path",
        ),
        ("model.dropout=0.1", r"got both; start\.run='runs/sft' has its own sizes and settings"),
    ],
)
def test_keys_of_a_run_on_preferences(override, message):
    with pytest.raises(ValueError, match=message):
        load_config(CONFIGS / "dpo.yaml", [override])


def test_a_config_of_another_command_is_refused():
    with pytest.raises(ValueError, match="is a config for `jaxfb rl`, not for `jaxfb train`; use jaxfb rl "):
        load_config(CONFIGS / "grpo_arithmetic.yaml", command="train")


@pytest.mark.parametrize(
    "content, sentence",
    [
        (b"run: 2001-13-45\n", r"a value that YAML cannot read: '2001-13-45' in line 1, read as timestamp"),
        (b"run:\n  epochs: !!float abc\n", r"cannot read: 'abc' in line 2, read as float"),
        (b"run: !!timestamp abc\n", r"cannot read: 'abc' in line 1, read as timestamp"),
        (b"run: !!bool 3\n", r"cannot read: '3' in line 1, read as bool"),
        (b"run: !!float _\n", r"cannot read: '_' in line 1, read as float"),
        (b"run: !!int abc\n", r"cannot read: 'abc' in line 1, read as int"),
        (b"run: " + b"9" * 5000, r"cannot read: '9999.*\.\.\. in line 1, read as int"),
        (b"{a: " * 2500 + b"1" + b"}" * 2500, r"maps or lists that are nested too deeply"),
        (b"[" * 2500 + b"]" * 2500, r"maps or lists that are nested too deeply"),
        (b"run: \xff\xfe", r"is not UTF-8: invalid start byte at offset 5"),
    ],
)
def test_odd_yaml_is_refused_in_a_sentence(tmp_path, content, sentence):
    (tmp_path / "odd.yaml").write_bytes(content)
    with pytest.raises(ConfigError, match=rf"\[config\] .*odd\.yaml.*{sentence}") as refusal:
        load_config(tmp_path / "odd.yaml")
    assert len(str(refusal.value).splitlines()) == 1
    if content.startswith(b"run: ") and b"\xff" not in content:
        with pytest.raises(ConfigError, match=rf"\[config\] run\.epochs.*{sentence}"):
            load_config(QUICKSTART, [f"run.epochs={content[5:].decode().strip()}"])


@pytest.mark.parametrize("name, key", [("chunks", "chunks"), ("pieces", "parallel.pieces")])
def test_a_config_and_a_program_name_the_same_things_and_each_answers_the_others_name(name, key):
    """YAML and the command line have chunks and pieces; Python, which counts them, num_chunks and num_pieces."""
    for wrong in (f"num_{name}", f"parallel.num_{name}"):
        for config in ("quickstart", "sft"):
            with pytest.raises(ConfigError, match=rf"unknown key {wrong}; did you mean {key}\?"):
                load_config(config, [f"{wrong}=2"])
    plan, optimizer = BatchPlan(rows=2, rows_per_microbatch=1), optax.sgd(0.1)
    calls = [
        get_forward_backward_func,
        partial(schedules.make, "1f1b", 2, 4),
        partial(make_train_step, lambda *_: None, optimizer, None, plan),
    ]
    for call in calls:
        with pytest.raises(TypeError, match=rf"keyword argument '{name}'; did you mean 'num_{name}'\?"):
            call(**{name: 2})


def test_paths_in_a_config_may_begin_with_the_home_directory(monkeypatch, tmp_path):
    """A shell expands no ~ in a file, nor after the = of an override."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(
        '{"model_type": "llama", "vocab_size": 260, "num_hidden_layers": 1, "hidden_size": 8, '
        '"num_attention_heads": 2, "intermediate_size": 16, "rms_norm_eps": 1e-6}'
    )
    paths = ["conversations.path=~/a.jsonl", "conversations.held_out_path=~/b.jsonl"]
    paths += ["conversations.template=~/c.jinja", "start.tokenizer=~/d", "lora.adapter=~/e"]
    config = load_config(CONFIGS / "sft.yaml", paths)
    named = config.conversations
    found = [named.path, named.held_out_path, named.template, config.start.tokenizer, config.lora.adapter]
    assert found == [str(tmp_path / name) for name in ("a.jsonl", "b.jsonl", "c.jinja", "d", "e")]
    begun = load_config(CONFIGS / "sft.yaml", ["model=null", "start.run=~/runs/a"])
    assert begun.start.run == str(tmp_path / "runs" / "a")
    imported = load_config(CONFIGS / "sft.yaml", ["model={from: ~/model}"])
    assert (imported.model.from_, imported.model.hidden_size) == (str(tmp_path / "model"), 8)
    assert config_from_dict(config_to_dict(imported)) == imported
