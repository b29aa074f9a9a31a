"""Rooms import downwards only, and private names are touched in one place on each side."""

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# From top to bottom; the rooms of one line do not import each other.
LAYERS = (
    ("narrowcast", "narrowcast.cli"),
    ("narrowcast.all_gather", "narrowcast.reduce_scatter"),
    ("narrowcast.agreement",),
    ("narrowcast.autotune",),
    ("narrowcast.allgather", "narrowcast.reducescatter"),
    ("narrowcast.moe",),
    ("narrowcast.placement",),
    ("narrowcast.telemetry",),
    ("narrowcast.steps",),
    ("narrowcast.topology",),
    ("narrowcast.wire",),
    ("narrowcast.errors",),
    ("narrowcast.fsdp2",),
    ("narrowcast.config",),
    ("narrowcast.section", "narrowcast.attribution", "narrowcast.util"),
)
LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}
BELOW_WIRE = {"errors", "config", "section", "attribution", "util", "wire"}
PRIVATE_OF_TORCH = {"narrowcast.fsdp2"}
PRIVATE_OF_TORCHTITAN = {"torchtitan_ext.private"}


def modules() -> dict[str, Path]:
    """The project's own modules, by dotted name."""
    files = [*(ROOT / "src").rglob("*.py"), *(ROOT / "torchtitan_ext").rglob("*.py")]
    found = {}
    for file in files:
        relative = file.relative_to(ROOT / "src" if "src" in file.parts else ROOT)
        parts = relative.with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


MODULES = modules()


def imports(module: str) -> Iterator[tuple[str, str]]:
    """Every import of a module, wherever it stands: the module that is imported, and the name that
    is taken from it (empty for ``import x``)."""
    for node in ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} has a relative import"
            yield from ((node.module or "", alias.name) for alias in node.names)


def imported(module: str) -> set[str]:
    """The project's own modules that a module imports."""
    targets = {f"{source}.{name}" if name else source for source, name in imports(module)}
    targets |= {source for source, _ in imports(module)}
    # Of a name that is taken from a module, the module; of a module taken from a package, that.
    return {
        target
        for target in targets & MODULES.keys()
        if not any(other.startswith(f"{target}.") for other in targets & MODULES.keys())
        or MODULES[target].name != "__init__.py"
    }


def room(module: str) -> str:
    """The package or single file right under ``narrowcast`` that a module is in."""
    return ".".join(module.split(".")[:2])


LIBRARY = sorted(module for module in MODULES if module.split(".")[0] == "narrowcast")
PLUGIN = sorted(module for module in MODULES if module.split(".")[0] == "torchtitan_ext")


def test_every_room_has_its_place() -> None:
    assert {room(module) for module in LIBRARY} == LEVEL.keys()


@pytest.mark.parametrize("module", LIBRARY)
def test_rooms_import_downwards_only(module: str) -> None:
    upwards = {
        other
        for other in imported(module)
        if room(other) != room(module) and LEVEL[room(other)] <= LEVEL[room(module)]
    }
    assert not upwards


def test_no_module_imports_itself_by_way_of_others() -> None:
    graph = {module: imported(module) - {module} for module in MODULES}
    TopologicalSorter(graph).prepare()  # raises a CycleError, which has the circle in it


@pytest.mark.parametrize("module", [m for m in LIBRARY if room(m) == "narrowcast.wire"])
def test_the_wire_knows_nothing_of_fsdp_or_policy(module: str) -> None:
    assert {room(other).removeprefix("narrowcast.") for other in imported(module)} <= BELOW_WIRE
    assert not any("fsdp" in f"{source}.{name}".lower() for source, name in imports(module))


@pytest.mark.parametrize("module", LIBRARY)
def test_the_library_knows_nothing_of_torchtitan(module: str) -> None:
    roots = {source.split(".")[0] for source, _ in imports(module)}
    assert not roots & {"torchtitan", "torchtitan_ext"}


def test_benchmarks_are_imported_by_nobody() -> None:
    inside = {m for m in PLUGIN if room(m) == "torchtitan_ext.benchmarks"}
    assert len(inside) > 5
    assert not {m for m in MODULES.keys() - inside if imported(m) & inside}


@pytest.mark.parametrize(
    ("root", "places"), [("torch", PRIVATE_OF_TORCH), ("torchtitan", PRIVATE_OF_TORCHTITAN)]
)
def test_private_names_are_touched_in_one_place(root: str, places: set[str]) -> None:
    outside = {
        (module, f"{source}.{name}")
        for module in MODULES.keys() - places
        for source, name in imports(module)
        if source.split(".")[0] == root and _is_private(f"{source}.{name}")
    }
    assert not outside


def _is_private(path: str) -> bool:
    parts = path.split(".")
    return any(part.startswith("_") and not part.startswith("__") for part in parts) or (
        ("distributed", "distributed_c10d") in pairwise(parts)
    )
