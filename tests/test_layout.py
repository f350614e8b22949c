"""Tests of the rules of imports, and of the sizes of folders."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STAGES = {"preprocess", "train", "eval"}
HEAVY = {"ray": {"pipeline/running/workers.py"}, "deepspeed": {"train/engine/engine.py"}}


@cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text())))


def imports(path: Path) -> set[str]:
    names = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.split(".")[0])
    return names


def modules(path: Path) -> set[str]:
    return {node.module for node in nodes(path) if isinstance(node, ast.ImportFrom) and node.module}


def sources() -> list[Path]:
    return [path for folder in ("pipeline", *sorted(STAGES)) for path in (ROOT / folder).rglob("*.py")]


def test_stages_import_the_pipeline_and_never_each_other():
    for path in sources():
        stage = path.relative_to(ROOT).parts[0]
        assert not (imports(path) & STAGES) - {stage}, f"{path} imports another stage"


def test_nothing_imports_infra():
    for path in sources():
        assert "infra" not in imports(path), f"{path} imports infra"


def test_each_heavy_engine_is_imported_in_one_file():
    for engine, allowed in HEAVY.items():
        everything = [*sources(), *(ROOT / "infra").rglob("*.py")]
        users = {str(path.relative_to(ROOT)) for path in everything if engine in imports(path)}
        assert users == allowed


LAYERS = ["basics", "lm", "decoding", "features", "drafts", "recipe", "artifacts", "serving", "running"]


def test_folders_of_the_pipeline_import_only_lower_layers():
    for path in (ROOT / "pipeline").glob("*/**/*.py"):
        room = LAYERS.index(path.relative_to(ROOT).parts[1])
        for module in modules(path):
            parts = module.split(".")
            if parts[0] == "pipeline" and len(parts) > 1:
                assert LAYERS.index(parts[1]) <= room, f"{path} imports {module}"


# Code that decodes with a target (verifies a draft's trees). Code that only captures states or requests answers uses a
# FeatureSource.
LOADS_A_TARGET = {"pipeline/features/engines", "pipeline/serving", "train/acceptance.py", "eval", "infra"}


def calls_target(path: Path) -> bool:
    calls = [node.func for node in nodes(path) if isinstance(node, ast.Call)]
    return any(isinstance(called, ast.Name) and called.id == "Target" for called in calls)


def test_only_listed_code_loads_a_target():
    for path in [*sources(), *(ROOT / "infra").rglob("*.py")]:
        name = path.relative_to(ROOT)
        if calls_target(path):
            assert LOADS_A_TARGET & {str(name), *map(str, name.parents)}, f"{path} loads a Target"


def test_no_folder_of_the_code_shows_more_than_ten_names():
    for folder in {path.parent for path in sources()}:
        names = {path.name for path in folder.iterdir()} - {"__init__.py", "__pycache__"}
        assert len(names) <= 10, f"{folder}: {sorted(names)}"


def test_no_pickle():
    for path in [*sources(), *(ROOT / "infra").rglob("*.py")]:
        assert not imports(path) & {"pickle", "dill", "joblib", "cloudpickle"}, path
        assert "torch.load(" not in path.read_text() or path.name == "unpickle.py", path
