"""The README's files and links exist, and its TOML is a job; `test_install` runs its example."""

import os
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_every_linked_file_exists() -> None:
    links = re.findall(r"\]\(([\w./]+)\)", README)
    assert len(links) >= 5
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for link in re.findall(r"\]\(([\w./]+\.md)\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name} links to {link}"


def test_both_commands_exist_and_can_be_executed() -> None:
    for command in re.findall(r"^    (scripts/\w+)", README, flags=re.MULTILINE):
        assert os.access(ROOT / command, os.X_OK), command


def test_the_toml_is_a_job_and_its_other_sections_fit_it(tmp_path: Path) -> None:
    from torchtitan_ext.toml.load import load_config

    job, *sections = re.findall(r"```toml\n(.*?)```", README, flags=re.DOTALL)
    file = tmp_path / "my_job.toml"
    file.write_text("\n".join([job, *sections]))
    config = load_config(str(file))
    assert config.narrowcast.all_gather.enable
    assert config.narrowcast.routing_trace.enable
    assert config.narrowcast.placement.enable
    assert config.training.steps == 1000
