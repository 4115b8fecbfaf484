"""The peers' own virtual environments: python benchmarks/peers/setup.py [PEER...] makes them."""

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
REQUIREMENTS = HERE / "requirements"
PEERS = tuple(sorted(path.stem for path in REQUIREMENTS.glob("*.txt")))


def environment(peer: str) -> Path:
    """The python of `peer`'s virtual environment, which is made or renewed unless it matches its
    requirements."""
    requirements = REQUIREMENTS / f"{peer}.txt"
    folder = ROOT / f".peer-{peer}"
    python = folder / "bin" / "python"
    stamp = folder / "requirements.stamp"
    wanted = f"{sys.version}\n{requirements.read_text()}"
    if python.exists() and stamp.exists() and stamp.read_text() == wanted:
        return python
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    pip = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--requirement", str(requirements)], check=True)
    stamp.write_text(wanted)
    return python


if __name__ == "__main__":
    for name in sys.argv[1:] or PEERS:
        print(environment(name))
