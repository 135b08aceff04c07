import ast
import dataclasses
import importlib
import inspect
import itertools
from pathlib import Path

import pytest

import training.utils
import training.utils.rl
from training.config import parts as configs
from training.recipes import rl_loop

SOURCE = Path(training.utils.__file__).parents[1]
CONFIGS = [rl_loop.Config] + [
    var for var in vars(configs).values() if dataclasses.is_dataclass(var) and isinstance(var, type)
]

DOCUMENTED = {
    "InfraConfig": "000 001 003",
    "DeployConfig": "000 001 003 004",
    "WeightSyncConfig": "000 001",
    "HotloadConfig": "003",
    "WandBConfig": "001 003 004",
    "ResumeConfig": "003",
    "TrainerConfig": "004",
    "ISConfig": "003",
    "TISConfig": "003",
    "DAPOConfig": "003",
    "GSPOConfig": "003",
    "CISPOConfig": "003",
    "DROConfig": "000 001",
    "WeightSyncScope": "000 001",
    "ResourceCleanup": "001",
    "create_trainer_job": "003",
    "setup_deployment": "003",
}


def test_training_utils_exports_what_the_documents_import_and_nothing_else():
    assert set(training.utils.__all__) == set(DOCUMENTED)
    assert all(hasattr(training.utils, name) for name in DOCUMENTED)


def test_the_documents_loss_functions_are_where_they_say():
    for name in ("make_grpo_loss_fn", "build_grpo_datums", "setup_infra", "Infra"):
        assert callable(getattr(training.utils.rl, name))


@pytest.mark.parametrize(
    ("example", "names"),
    [
        ("single_turn_token_in", {"rollout": "make_rollout_fn", "train": "command"}),
        (
            "multi_turn_message_in",
            {"rollout": "make_rollout_fn", "train": "command", "reward": "conversation_reward"},
        ),
    ],
    ids=["single turn", "several turns"],
)
def test_the_documents_examples_have_their_files(example, names):
    for file, name in names.items():
        module = importlib.import_module(f"training.examples.rl.{example}.{file}")
        assert getattr(module, name).__module__ == module.__name__


@pytest.fixture(scope="module")
def names_read() -> set[str]:
    """Every attribute that the cookbook or a loss reads, and every name handed on as a string."""
    paths = [*SOURCE.rglob("*.py"), *(SOURCE.parent / "hearth" / "losses").rglob("*.py")]
    nodes = [node for path in paths for node in ast.walk(ast.parse(path.read_text()))]
    attributes = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    strings = {node.value for node in nodes if isinstance(node, ast.Constant)}
    return attributes | {string for string in strings if isinstance(string, str)}


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS, ids=lambda case: case.__name__)
def test_every_field_has_a_reader(config, names_read):
    assert {field.name for field in dataclasses.fields(config)} <= names_read


@pytest.mark.parametrize("config", CONFIGS, ids=lambda case: case.__name__)
def test_every_field_is_described_where_it_stands(config):
    (body,) = (node.body for node in ast.parse(inspect.getsource(config)).body)
    described = {
        field.target.id
        for field, after in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(after, ast.Expr)
    }

    own = {node.target.id for node in body if isinstance(node, ast.AnnAssign)}
    assert own == described or config is configs.SyncSettings
