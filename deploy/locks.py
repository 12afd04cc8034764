"""Resolve the dependencies named in the two pyproject files into the hashed locks under `requirements/`.

The locks hold no host name: whoever installs from them uses the index that their own machine is set up for.
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCKS = ROOT / "requirements"
UV = Path(sys.executable).parent / "uv"
# setuptools builds our own two distributions without a download outside the lock.
BUILD = "setuptools>=80\n"


def resolve(lock: str, *arguments: str, names: str) -> None:
    """Resolve `names` (requirement lines) and `arguments` (passed to uv) into one lock file."""
    command = [str(UV), "pip", "compile", *arguments, "-", "--quiet", "--universal", "--python-version", "3.11"]
    command += ["--generate-hashes", "--no-emit-index-url", "--no-header", "--no-annotate"]
    command += ["--no-emit-package", "aijobs", "--no-emit-package", "aijobs-server"]
    subprocess.run([*command, "-o", str(LOCKS / lock)], cwd=ROOT, input=names, text=True, check=True)


def main() -> None:
    """Entry point of `make lock`."""
    resolve("uv.lock", names="uv\n")
    resolve("runtime.lock", "pyproject.toml", "--extra", "all", names=BUILD)
    resolve(
        "dev.lock", "pyproject.toml", "--extra", "all", "--group", "dev", "-c", "requirements/runtime.lock", names=BUILD
    )


if __name__ == "__main__":
    main()
