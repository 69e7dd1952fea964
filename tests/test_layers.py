"""Imports run one way: from what the user calls down to what moves bytes."""

import ast
import functools
import graphlib
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "elephant"

# From the top down: a layer may import those below it, never those above or beside it. A folder tells in which process
# its code runs: what users call and the driver, Spark's Python workers, the processes of ranks, or any of them.
LAYERS = [
    {"__main__"},
    {"cli"},
    {"jobs"},
    {"spark", "testing"},
    {"driver"},
    {"task"},
    {"cluster"},
    {"rank"},
    {"training"},
    {"modeling", "monitor"},
    {"backends"},
    {"checkpoint"},
    {"collective", "parameter_server", "gossip", "data"},
    {"tables"},
    {"compression", "storage"},
    {"net"},
    {"config"},
    {"options"},
    {"timeouts"},
    {"kinds"},
    {"algorithms", "errors"},
]
NAMED = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
SPARK = ("pyspark", "py4j")
KERAS = ("keras", "tensorflow", "jax", "torch")
# What each part may not import, at any place in its modules, not even for types. The parts that are not here may import
# all: those of users and of the driver. The root package imports nothing at run time, so anything may import it.
FORBIDDEN = {
    "task": (*KERAS, "pyspark.sql"),
    **dict.fromkeys(("rank", "training", "modeling", "backends"), SPARK),
    **dict.fromkeys(
        (
            "monitor",
            "checkpoint",
            "collective",
            "parameter_server",
            "gossip",
            "tables",
            "data",
            "compression",
            "storage",
            "net",
            "config",
            "options",
            "timeouts",
            "kinds",
            "algorithms",
            "errors",
        ),
        (*SPARK, *KERAS),
    ),
    **dict.fromkeys(("cli", "cluster"), KERAS),
}


# Names in the code of saved models, and those that users import from elsewhere than the root package.
KEPT = (
    "elephant.training.images.decode_images",
    "elephant.training.warmup.LearningRateWarmup",
    "elephant.modeling.live_model.TakenModel",
    "elephant.modeling.layers.feature_embeddings.ShardedEmbeddings",
    "elephant.modeling.layers.sharded_embedding.ShardedEmbedding",
    "elephant.cluster.local.local_session",
    "elephant.config.Timeouts",
    "elephant.spark.conversions.to_simple_rdd",
)


def modules():
    return sorted(PACKAGE.rglob("*.py"))


@functools.cache
def tree_of(path):
    return ast.parse(path.read_text())


@functools.cache
def nodes_of(path):
    """Returns all nodes of a module: several tests walk them."""
    return list(ast.walk(tree_of(path)))


def teardown_module():
    tree_of.cache_clear()
    nodes_of.cache_clear()


def part_of(path):
    relative = path.relative_to(PACKAGE)
    return relative.parts[0].removesuffix(".py")


def level_of(part):
    return next(level for level, names in enumerate(LAYERS) if part in names)


def imported_names(path):
    """Yields the name of every import in a module, of those for type checkers too."""
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_imports_when_walked_then_run_down_only():
    offenders = [
        f"{path.relative_to(PACKAGE)} imports {name}, which is not below it"
        for path in modules()
        for name in imported_names(path)
        if part_of(path) != "__init__" and not may_import(part_of(path), name)
    ]
    assert not offenders, "\n".join(offenders)


def may_import(part, name):
    """Returns whether a part of the package may import a module, by its place in the layers."""
    pieces = name.split(".")
    if pieces[0] != "elephant" or len(pieces) < 3 or pieces[1] == part:
        return True
    return level_of(part) < level_of(pieces[1])


MAX_IN_A_FOLDER = 16


def imported_modules():
    """Returns the files of this package that each of its modules imports, type-checking imports included.

    The root package imports nothing at run time: it names what users import.
    """
    files = {}
    for path in modules():
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    graph = {path: set() for path in files.values()}
    for path in files.values():
        for node in nodes_of(path):
            if isinstance(node, ast.Import):
                graph[path] |= {files.get(alias.name) for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                graph[path] |= {files.get(name, files.get(node.module)) for name in names}
        graph[path] -= {None, path}
    return graph


def test_modules_when_imports_for_types_count_too_then_none_imports_itself_round_a_circle():
    root = PACKAGE / "__init__.py"
    graph = {path: found - {root} for path, found in imported_modules().items() if path != root}
    # A CycleError names the circle.
    graphlib.TopologicalSorter(graph).prepare()


def test_folders_when_their_modules_are_counted_then_can_be_taken_in_at_a_glance():
    rooms = [path for path in modules() if path.name != "__init__.py"]
    for folder in {path.parent for path in rooms}:
        assert sum(path.parent == folder for path in rooms) <= MAX_IN_A_FOLDER, folder


def test_parts_when_walked_then_name_nothing_that_their_process_does_without():
    offenders = [
        f"{path.relative_to(PACKAGE)} imports {name}"
        for path in modules()
        for name in imported_names(path)
        if any(f"{name}.".startswith(f"{package}.") for package in FORBIDDEN.get(part_of(path), ()))
    ]
    assert not offenders, "\n".join(offenders)


# Words of this project alone, for things that the field has names for; docs/development.md has the glossary.
RETIRED = {
    "archivist", "cargo", "claim", "claimed", "claims", "door", "finding", "findings", "following", "gang", "gate",
    "greet", "greeted", "greeting", "kept", "knock", "lend", "lending", "lent", "life", "members", "passing", "said",
    "told",
}  # fmt: skip


def test_names_when_walked_then_are_those_of_the_field_and_no_class_has_another_s():
    offenders, classes = [], {}
    for path in modules():
        where = path.relative_to(PACKAGE)
        tree = tree_of(path)
        nodes = [node for node in nodes_of(path) if isinstance(node, NAMED)]
        for name in {where.stem, *(node.name for node in nodes), *values_named_in(tree)}:
            words = set(re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().split("_"))
            offenders += [f"{where}: {name} uses the retired word {word!r}" for word in sorted(words & RETIRED)]
        for node in nodes:
            if isinstance(node, ast.ClassDef):
                if classes.setdefault(node.name, where) != where:
                    offenders.append(f"{where}: class {node.name} is in {classes[node.name]} too")
    assert not offenders, "\n".join(offenders)


def values_named_in(tree):
    """Yields the names of a module's own values, and of the fields of its classes."""
    bodies = [tree.body, *(node.body for node in ast.walk(tree) if isinstance(node, ast.ClassDef))]
    for node in (node for body in bodies for node in body if isinstance(node, ast.Assign | ast.AnnAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        yield from (part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name))


FIRST_WORDS = re.compile(r"(What|Which|Who|Where|How|Whether|(Returns|Yields) what)\b")


def test_docstrings_when_their_first_lines_are_read_then_begin_with_a_noun_or_an_imperative():
    found = {}
    for path in modules():
        for node in nodes_of(path):
            text = ast.get_docstring(node) or "" if isinstance(node, (ast.Module, *NAMED)) else ""
            if FIRST_WORDS.match(text):
                found.setdefault(str(path.relative_to(PACKAGE)), []).append(text.partition("\n")[0])
    assert not found, found


def test_private_methods_when_classes_are_walked_then_no_subclass_overrides_one_that_works():
    bases, methods = {}, {}
    for path in modules():
        for node in nodes_of(path):
            if isinstance(node, ast.ClassDef):
                bases[node.name] = [ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases]
                methods[node.name] = {part.name: part for part in node.body if isinstance(part, ast.FunctionDef)}

    def above(name):
        for base in bases.get(name, ()):
            yield base
            yield from above(base)

    offenders = [
        f"{name}.{method} overrides {base}.{method}"
        for name, own in methods.items()
        for method in own
        for base in above(name)
        if method.startswith("_") and not method.startswith("__") and is_concrete(methods.get(base, {}).get(method))
    ]
    assert not offenders, "\n".join(offenders)


def is_concrete(method):
    """Returns whether a class has a method that is not abstract."""
    return method is not None and not any("abstractmethod" in ast.unparse(part) for part in method.decorator_list)


# What one process imports in turn, and the packages that are still not there then; so none of the statements before it
# brings them either.
IMPORTED = [
    ("import elephant", ("pyspark", "keras", "tensorflow", "pyarrow", "yaml", "numpy", "pandas")),
    ("import elephant.cli.main", ("pyspark", "keras", "tensorflow", "pyarrow", "yaml", "numpy", "pandas")),
    ("elephant.collective.rank()", ("pyspark", "keras", "tensorflow", "pyarrow", "yaml", "pandas")),
    ("elephant.run(int)", ("pyspark", "keras", "tensorflow", "pyarrow", "yaml", "pandas")),
    ("import elephant.jobs.training, elephant.jobs.inference", ("pyspark", "keras", "tensorflow", "pyarrow", "yaml")),
    ("import elephant.collective.ring, elephant.net.server", ("pyspark", "keras", "tensorflow", "pyarrow")),
    ("import elephant.rank.__main__", ("pyspark", "keras", "tensorflow", "pyarrow", "pandas")),
    # Tasks of functions, of which there may be dozens on two cores.
    ("import elephant.task.rank_task", ("pyspark", "keras", "tensorflow", "pyarrow", "pandas")),
    (
        "from elephant.cluster.spark_job import result_row; result_row(0, b'a').schema",
        ("pyspark", "keras", "tensorflow", "pandas"),
    ),
    ("import elephant.testing", ("pyspark", "keras", "tensorflow", "pandas")),
    ("import elephant.task.task, elephant.driver.run_ranks", ("keras", "tensorflow", "pandas")),
    ("import elephant.driver.asynchronous_fit", ("keras", "tensorflow", "pandas")),
    # Functions of these modules run in Spark's Python workers.
    ("import elephant.task.predict_task, elephant.task.partition_statistics", ("keras", "tensorflow", "pandas")),
    ("import elephant.cluster.row_source, elephant.spark.evaluate", ("keras", "tensorflow", "pandas")),
    ("import elephant.spark.hadoop_files, elephant.driver.server_processes", ("keras", "tensorflow", "pandas")),
    # And of this one, with vectors of pyspark.ml, which imports pandas.
    ("import elephant.spark.conversions", ("keras", "tensorflow")),
]


def test_imports_when_done_in_a_new_process_then_leave_heavy_packages_out():
    code = "import sys\n" + "".join(
        f"{statement}\nprint({statement!r}, [name for name in {absent!r} if name in sys.modules])\n"
        for statement, absent in IMPORTED
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == [f"{statement} []" for statement, _ in IMPORTED]


@pytest.mark.parametrize(
    ("missing", "name", "remedy"),
    [
        ("pyspark", "Files", "'elephant-spark[spark]'"),
        ("tensorflow", "LearningRateWarmup", "'elephant-spark[tensorflow]'"),
    ],
)
def test_import_when_a_package_is_missing_then_says_which_extra_brings_it(missing, name, remedy):
    code = (
        "import sys\n"
        "class Without:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.split('.')[0] == {missing!r}:\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Without())\n"
        "try:\n"
        f"    from elephant import {name}\n"
        "except ModuleNotFoundError as error:\n"
        "    print(error, error.__suppress_context__)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith(f"elephant.{name}: expected {missing} to be installed. Received: No module named ")
    assert f"pip install {remedy}" in done.stdout and done.stdout.endswith(" True\n")


@pytest.mark.parametrize("name", KEPT)
def test_modules_when_saved_models_or_users_name_them_then_are_where_they_were(name):
    module, _, attribute = name.rpartition(".")
    assert hasattr(importlib.import_module(module), attribute)


def test_public_names_when_listed_then_are_exactly_these():
    import elephant

    assert elephant.__all__ == [
        "DistributedOptimizer",
        "Files",
        "FitListener",
        "KerasEstimator",
        "KerasModel",
        "LearningRateWarmup",
        "ShardedEmbedding",
        "ShardedEmbeddings",
        "SparkMLlibModel",
        "SparkModel",
        "__version__",
        "adapt",
        "broadcast_variables",
        "collective",
        "decode_images",
        "distributed",
        "load_spark_model",
        "predict_udf",
        "prepared",
        "run",
        "search",
    ]
    assert dir(elephant) == sorted(elephant.__all__)
    assert all(getattr(elephant, name) is not None for name in elephant.__all__)
