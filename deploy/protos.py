"""Generate the gRPC stubs from `protos/` into `libs/aijobs/v1`, or check that the committed ones are up to date.

The proto package and the Python package have the same path, so the generated imports hold as they are.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
STUBS = ROOT / "libs"
PACKAGE = Path("aijobs/v1")


def generate(target: Path) -> dict[str, bytes]:
    """Run protoc into `target` and return the generated files by their name."""
    sources = sorted(str(path.relative_to(PROTOS)) for path in (PROTOS / PACKAGE).glob("*.proto"))
    plugins = Path(sys.executable).parent
    subprocess.run(
        [
            sys.executable,
            "-m",
            "grpc_tools.protoc",
            f"--proto_path={PROTOS}",
            f"--plugin=protoc-gen-mypy={plugins / 'protoc-gen-mypy'}",
            f"--plugin=protoc-gen-mypy_grpc={plugins / 'protoc-gen-mypy_grpc'}",
            f"--python_out={target}",
            f"--grpc_python_out={target}",
            f"--mypy_out=quiet:{target}",
            f"--mypy_grpc_out=quiet:{target}",
            *sources,
        ],
        check=True,
    )
    return {path.name: path.read_bytes() for path in sorted((target / PACKAGE).iterdir()) if path.is_file()}


def main() -> int:
    """Entry point of `make protos` and `make verify`; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a stub is out of date")
    check = parser.parse_args().check
    with tempfile.TemporaryDirectory() as folder:
        wanted = generate(Path(folder))
    stubs = STUBS / PACKAGE
    present = {path.name: path.read_bytes() for path in stubs.glob("*_pb2*")}
    stale = sorted(name for name in wanted.keys() | present.keys() if wanted.get(name) != present.get(name))
    if check:
        for name in stale:
            print(f"{stubs.relative_to(ROOT) / name} is out of date: run make protos", file=sys.stderr)
        return 1 if stale else 0
    stubs.mkdir(parents=True, exist_ok=True)
    for name in stale:
        if name in wanted:
            (stubs / name).write_bytes(wanted[name])
        else:
            (stubs / name).unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
