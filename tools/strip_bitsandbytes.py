"""A bitsandbytes wheel with the library of one CUDA version: 43 MB become 4, for a machine without network.

    python tools/strip_bitsandbytes.py .whl/bitsandbytes-*.whl 130

The wheel is replaced. pip installs it as before: it does not ask whether every file of RECORD is there.
"""

import os
import sys
import zipfile
from pathlib import Path

ALWAYS = "libbitsandbytes_cpu.so"


def strip(wheel: Path, cuda: str) -> int:
    """Bytes of the wheel afterwards.

    Raises:
        SystemExit: the wheel has no library for this CUDA version.
    """
    wanted = f"libbitsandbytes_cuda{cuda}.so"
    temporary = wheel.with_name(f"{wheel.name}.tmp")
    with zipfile.ZipFile(wheel) as source:
        names = [member.filename for member in source.infolist()]
        if not any(name.endswith(wanted) for name in names):
            raise SystemExit(f"{wheel.name} holds no {wanted}")
        with zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED) as target:
            for name in names:
                if not name.endswith(".so") or name.endswith((ALWAYS, wanted)):
                    target.writestr(name, source.read(name))
    os.replace(temporary, wheel)
    return wheel.stat().st_size


if __name__ == "__main__":
    print(strip(Path(sys.argv[1]), sys.argv[2]), "bytes")
