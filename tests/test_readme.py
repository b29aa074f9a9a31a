"""The README's example runs as it is."""

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
