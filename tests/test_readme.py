"""The README's example runs as it stands, and its files and links exist."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_the_example_runs_and_sends_less_than_half(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    script = tmp_path / "example.py"
    script.write_text(example)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "--local-ranks-filter", "0", str(script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    (percent,) = re.search(r"sent (\d+)% of plain FSDP2's bytes", done.stdout).groups()
    assert 0 < int(percent) < 50
    (bits,) = re.search(r"([\d.]+) bits a parameter for its gradient", done.stdout).groups()
    assert 0 < float(bits) < 12


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
