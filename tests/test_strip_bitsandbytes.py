"""`tools/strip_bitsandbytes.py`: a wheel that keeps one CUDA version's library."""

import zipfile
from pathlib import Path

import pytest

from tools.strip_bitsandbytes import strip


def test_only_the_wanted_library_is_left(tmp_path: Path) -> None:
    wheel = tmp_path / "bitsandbytes-0.0-py3-none-any.whl"
    names = ["__init__.py", "libbitsandbytes_cpu.so", "libbitsandbytes_cuda128.so", "libbitsandbytes_cuda130.so"]
    with zipfile.ZipFile(wheel, "w") as made:
        for name in names:
            made.writestr(f"bitsandbytes/{name}", name)
    assert strip(wheel, "130") == wheel.stat().st_size
    with zipfile.ZipFile(wheel) as stripped:
        assert [name.rpartition("/")[2] for name in stripped.namelist()] == [names[0], names[1], names[3]]
        assert stripped.read("bitsandbytes/__init__.py") == b"__init__.py"
    with pytest.raises(SystemExit, match="cuda999"):
        strip(wheel, "999")
