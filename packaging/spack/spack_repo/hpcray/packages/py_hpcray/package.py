# Copyright 2026 the hpcray authors
#
# SPDX-License-Identifier: Apache-2.0

from spack_repo.builtin.build_systems.python import PythonPackage

from spack.package import *


class PyHpcray(PythonPackage):
    """Ray's programming model (tasks, actors, object references) as a citizen of MPI, UCX and Slurm: MPI starts the
    processes and carries control messages, UCX moves objects between nodes, shared memory holds them inside a node."""

    homepage = "https://pypi.org/project/hpcray/"
    pypi = "hpcray/hpcray-0.1.0.tar.gz"

    license("Apache-2.0", checked_by="hpcray")

    version("0.1.0", sha256="0000000000000000000000000000000000000000000000000000000000000000")

    variant("slurm", default=False, description="Submit jobs from Python and with `hpcray submit` (submitit)")
    variant("observe", default=False, description="`hpcray top` and `hpcray dashboard`")

    depends_on("python@3.10:", type=("build", "run"))
    depends_on("py-hatchling@1.21:", type="build")

    depends_on("py-click@8.1:", type=("build", "run"))
    depends_on("py-cloudpickle@3.0:", type=("build", "run"))
    depends_on("py-msgspec@0.18:", type=("build", "run"))
    depends_on("py-numpy@1.24:", type=("build", "run"))
    depends_on("py-pathspec@0.12:", type=("build", "run"))
    depends_on("py-prometheus-client@0.20:", type=("build", "run"))
    depends_on("py-rich@13:", type=("build", "run"))
    depends_on("py-threadpoolctl@3.1:", type=("build", "run"))
    depends_on("py-tomli@2:", type=("build", "run"), when="^python@:3.10")

    # The MPI of the site; without UCX's Python bindings object bytes go over MPI.
    depends_on("mpi", type="run")
    depends_on("py-mpi4py@4.0:", type="run")

    depends_on("py-submitit@1.5:", type="run", when="+slurm")
    depends_on("py-nvidia-ml-py@12:", type="run", when="+observe")
    depends_on("py-starlette@0.37:", type="run", when="+observe")
    depends_on("py-textual@1.0:", type="run", when="+observe")
    depends_on("py-tqdm@4.60:", type="run", when="+observe")
    depends_on("py-uvicorn@0.23:", type="run", when="+observe")
    depends_on("py-wsproto@1.2:", type="run", when="+observe")

    import_modules = ["hpcray", "hpcray.cli", "hpcray.compat", "hpcray.launch"]
