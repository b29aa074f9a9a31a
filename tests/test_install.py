"""The wheel, installed without extras, is all that an FSDP2 script needs.

It is installed into a virtual environment of its own, which gets links to the dependencies that
the wheel declares, and to theirs in turn: nothing else of this environment can be imported there.
triton is left out even where torch declares it, since the CPU builds of torch do not.
"""

import importlib.metadata as metadata
import os
import re
import subprocess
import sys
import venv
from pathlib import Path
from shutil import copy, copytree

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
OF_EXTRAS = ("torchtitan", "tensorboard", "triton", "matplotlib")

IMPORT_EVERYTHING = """
import importlib, importlib.util, pkgutil, runpy, sys
for name in OF_EXTRAS:
    assert importlib.util.find_spec(name) is None, name
import narrowcast
assert narrowcast.__file__.startswith(sys.prefix), narrowcast.__file__
names = [found.name for found in pkgutil.walk_packages(narrowcast.__path__, "narrowcast.")]
assert "narrowcast.fsdp2" in names
for name in [*names, "torchtitan_ext"]:
    try:
        importlib.import_module(name)
    except ImportError as error:
        print(f"{name}: {error}")
sys.argv[1:] = ["profile", "--job.config_file", "job.toml"]
try:
    runpy.run_path(f"{sys.prefix}/bin/narrowcast", run_name="__main__")
except SystemExit as ended:
    assert ended.code == 2
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of executables of an environment with the wheel and without extras."""
    folder = tmp_path_factory.mktemp("install")
    wheel = _build_wheel(folder)
    venv.create(folder / "venv", symlinks=True)
    executables = folder / "venv" / "bin"
    pip = [sys.executable, "-m", "pip", "--python", str(executables / "python")]
    _succeeds([*pip, "install", "--quiet", "--no-compile", "--no-index", "--no-deps", str(wheel)])
    (site_packages,) = (folder / "venv" / "lib").glob("python*/site-packages")
    (distribution,) = metadata.distributions(name="narrowcast", path=[str(site_packages)])
    for found in _closure(distribution):
        _link(found, site_packages)
    return executables


def _build_wheel(folder: Path) -> Path:
    """Of a copy: setuptools writes into the sources."""
    sources = folder / "sources"
    sources.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        copy(ROOT / name, sources)
    for name in ("src", "torchtitan_ext"):
        copytree(ROOT / name, sources / name)
    pip_wheel = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index"]
    pip_wheel += ["--no-build-isolation", "--wheel-dir", str(folder), str(sources)]
    _succeeds(pip_wheel)
    (wheel,) = folder.glob("narrowcast-*.whl")
    return wheel


def _closure(distribution: metadata.Distribution) -> list[metadata.Distribution]:
    """What a distribution depends on without extras, directly or not, as installed here."""
    found: dict[str, metadata.Distribution] = {}
    wanted = [(text, "") for text in distribution.requires or []]
    visited = set()
    while wanted:
        text, extra = wanted.pop()
        requirement = Requirement(text)
        name = canonicalize_name(requirement.name)
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        found[name] = metadata.distribution(name)
        for extra_of_it in ("", *requirement.extras):
            if (name, extra_of_it) not in visited:
                visited.add((name, extra_of_it))
                wanted += [(text, extra_of_it) for text in found[name].requires or []]
    return list(found.values())


def _link(distribution: metadata.Distribution, site_packages: Path) -> None:
    """Links a distribution's top-level files and folders into another environment."""
    if distribution.name in OF_EXTRAS:
        return
    for top in {file.parts[0] for file in distribution.files or []} - {"..", "__pycache__"}:
        link = site_packages / top
        if not link.is_symlink():  # folders of several distributions, such as `nvidia`
            link.symlink_to(distribution.locate_file(top))


def _run(command: list[str | Path], **kwargs: str | Path) -> subprocess.CompletedProcess[str]:
    """Without this environment's search path, in which the sources may stand."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONPATH", None)
    return subprocess.run(command, env=environment, capture_output=True, text=True, **kwargs)


def _succeeds(command: list[str | Path], **kwargs: str | Path) -> str:
    done = _run(command, **kwargs)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_readmes_example_runs_and_sends_less_than_half(installed: Path, tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", readme, flags=re.DOTALL)
    (tmp_path / "example.py").write_text(example)
    command = [installed / "python", "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "--local-ranks-filter", "0", "example.py"]
    output = _succeeds(command, cwd=tmp_path)
    (percent,) = re.search(r"sent (\d+)% of baseline FSDP2's bytes", output).groups()
    assert 0 < int(percent) < 50
    (bits,) = re.search(r"([\d.]+) bits a parameter for its gradient", output).groups()
    assert 0 < float(bits) < 12


def test_what_needs_an_extra_names_it_and_nothing_else_needs_one(
    installed: Path, tmp_path: Path
) -> None:
    script = f"OF_EXTRAS = {OF_EXTRAS}\n{IMPORT_EVERYTHING}"
    done = _run([installed / "python", "-c", script], cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    failed = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    kernels = {"narrowcast.moe.kernels", "narrowcast.moe.swiglu_triton"}
    assert set(failed) == {*kernels, "torchtitan_ext"}
    for message in (*failed.values(), done.stderr):
        assert "pip install 'narrowcast[torchtitan]'" in message
