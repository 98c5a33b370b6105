"""Write the recipes of one release, with its version and the checksum of its sdist, into a directory:

    python packaging/make_recipes.py dist/hpcray-0.1.0.tar.gz OUT

In the tree the recipes have the checksum of nothing: an sdist is made before its checksum is known.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
RECIPES = (
    "spack/spack_repo/hpcray/repo.yaml",
    "spack/spack_repo/hpcray/packages/py_hpcray/package.py",
    "easybuild/hpcray-0.1.0-foss-2024a.eb",
    "conda/recipe.yaml",
    "apptainer/hpcray.def",
    "lmod/hpcray/0.1.0.lua",
)
UNKNOWN = "0" * 64
IN_TREE = "0.1.0"


def make_recipes(sdist: Path, out: Path) -> list[Path]:
    """Copy the recipes below `out`, for the version that the sdist's name says. Returns their paths."""
    name = re.fullmatch(r"hpcray-(\d[\w.]*)\.tar\.gz", sdist.name)
    if name is None:
        raise ValueError(f"{sdist.name} is no sdist of hpcray; hint: python -m build --sdist")
    version, checksum = name[1], hashlib.sha256(sdist.read_bytes()).hexdigest()
    made = []
    for recipe in RECIPES:
        target = out / recipe.replace(IN_TREE, version)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text((HERE / recipe).read_text().replace(UNKNOWN, checksum).replace(IN_TREE, version))
        shutil.copymode(HERE / recipe, target)
        made.append(target)
    return made


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    print(*make_recipes(Path(sys.argv[1]), Path(sys.argv[2])), sep="\n")
