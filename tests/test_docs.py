"""Every page is true of what is there: its links, commands, paths, names and TOML."""

import ast
import contextlib
import importlib
import importlib.util
import io
import os
import re
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest

from narrowcast import cli
from torchtitan_ext.charts import CHARTS
from torchtitan_ext.config import NarrowcastConfig
from torchtitan_ext.toml.load import load_config

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
OUTSIDE = ("torchtitan.train",)  # modules of others
FOLDERS = "src|tests|torchtitan_ext|train_configs|scripts|docs"
SECTIONS = {one.name: one.default_factory for one in fields(NarrowcastConfig)}

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


def _blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), flags=re.DOTALL)


def _slugs(page: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@each_page
def test_every_link_leads_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in _slugs(target), link


def test_the_readme_leads_to_every_page() -> None:
    links = set(re.findall(r"\]\((docs/\w+\.md)", PAGES[0].read_text()))
    assert links == {f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")}


@each_page
def test_every_module_that_is_run_exists(page: Path) -> None:
    for module in re.findall(r" -m\s+([\w.]+)", page.read_text()):
        assert module in OUTSIDE or importlib.util.find_spec(module) is not None, module


@each_page
def test_every_path_exists(page: Path) -> None:
    for path in re.findall(rf"(?<![\w/.])(?:{FOLDERS})/[\w./-]*[\w/]", page.read_text()):
        assert (ROOT / path).exists(), path
        assert not path.startswith("scripts/") or os.access(ROOT / path, os.X_OK), path


def test_every_page_that_a_docstring_names_exists() -> None:
    for folder in ("src", "torchtitan_ext", "tests", "train_configs", "scripts"):
        for file in (ROOT / folder).rglob("*"):
            if file.suffix in ("", ".py", ".toml") and file.is_file():
                for name in re.findall(r"docs/\w+\.md", file.read_text()):
                    assert (ROOT / name).exists(), f"{file} names {name}"


@each_page
def test_every_narrowcast_command_is_one(page: Path) -> None:
    text = page.read_text().replace("\\\n", " ")
    for line in re.findall(r"^    narrowcast (.*)$", text, flags=re.MULTILINE):
        words = line.split("#")[0].split()
        verb = [word for word in words[:2] if word.isalpha()]
        if verb == ["profile"]:  # its other flags are those of the job
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), pytest.raises(SystemExit) as ended:
            cli.main([*verb, "--help"])
        assert ended.value.code == 0, line
        for flag in re.findall(r"--[\w-]+", line):
            assert flag in printed.getvalue(), f"{flag} of {line}"


@each_page
def test_every_import_of_an_example_works(page: Path) -> None:
    for block in _blocks(page, "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom):
                module = importlib.import_module(node.module)
                assert all(hasattr(module, name.name) for name in node.names), ast.unparse(node)


@each_page
def test_every_section_of_a_toml_example_is_allowed(page: Path) -> None:
    for block in _blocks(page, "toml"):
        for section, values in tomllib.loads(block).get("narrowcast", {}).items():
            SECTIONS[section](**values)


@each_page
def test_every_dotted_name_is_a_key_or_stands_in_a_module(page: Path) -> None:
    for name in re.findall(r"`(narrowcast(?:\.\w+)+)`", page.read_text()):
        _, section, *key = name.split(".")
        if section in SECTIONS and len(key) < 2:
            assert not key or key[0] in {one.name for one in fields(SECTIONS[section])}, name
            continue
        module, _, attribute = name.rpartition(".")
        assert importlib.util.find_spec(module) is not None, name
        found = hasattr(importlib.import_module(module), attribute)
        assert found or importlib.util.find_spec(name) is not None, name


def test_every_case_of_the_compatibility_table_is_tested() -> None:
    tables = (ROOT / "docs" / "compatibility.md").read_text()
    of = {
        "compatibility": "tests/narrowcast/test_compatibility.py",
        "modes": "tests/narrowcast/test_all_gather.py",
        "torchtitan": "tests/torchtitan_ext/test_training.py",
    }
    for source, path in of.items():
        cases = re.findall(rf"{source} \(((?:`[^`]+`(?:, )?)+)\)", tables)
        assert cases, source
        for case in re.findall(r"`([^`]+)`", " ".join(cases)):
            assert re.search(rf'def {case}\(|"{case}"', (ROOT / path).read_text()), case


def test_the_page_of_dashboards_has_every_scalar_that_is_drawn() -> None:
    page = (ROOT / "docs" / "dashboards.md").read_text()
    for charts in CHARTS.values():
        for tag in (tag for chart in charts for tag in chart.tags):
            kind, _, name = tag.partition("/")
            drawn = tag if kind == "selection" and not name.startswith("share/") else kind
            assert f"narrowcast/{drawn}" in page or f"`{drawn}/" in page, tag


def test_the_toml_of_the_readme_is_a_job(tmp_path: Path) -> None:
    (sections,) = _blocks(PAGES[0], "toml")
    assert len(sections.strip().splitlines()) == 6
    (job, *_) = _blocks(ROOT / "docs" / "toml.md", "toml")
    base = job[: job.index("[narrowcast")]
    file = tmp_path / "my_job.toml"
    file.write_text(base + sections)
    config = load_config(str(file))
    assert config.narrowcast.all_gather.enable
    assert config.narrowcast.reduce_scatter.enable
    assert config.narrowcast.dispatch.deduplicate
