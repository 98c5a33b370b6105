-- A modulefile for hpcray in a virtual environment of its own. As the site's software user:
--     module load python openmpi
--     python3 -m venv /apps/hpcray/0.1.0
--     /apps/hpcray/0.1.0/bin/pip install --no-binary mpi4py 'mpi4py>=4' hpcray
-- Set `root` to that place, and `needs` to the modules above. The environment is not activated: a user's own virtual
-- environment stays in force, and finds hpcray by PYTHONPATH where it has the same minor version of Python.
local version = myModuleVersion()
local root = pathJoin("/apps/hpcray", version)
local needs = { "python", "openmpi" }

help([[
hpcray ]] .. version .. [[: programs written for Ray on MPI, UCX and Slurm.

    hpcray doctor                       what a job here would use
    hpcray-launch -n 4 program.py       this machine as four nodes
    sbatch -N 4 ... hpcray-launch program.py
]])
whatis("Name: hpcray")
whatis("Version: " .. version)
whatis("Category: tools, distributed computing")
whatis("Description: Ray's programming model on MPI, UCX and Slurm")
whatis("URL: https://pypi.org/project/hpcray/")

conflict("hpcray")
for _, name in ipairs(needs) do
    if not isloaded(name) then
        load(name)
    end
end

prepend_path("PATH", pathJoin(root, "bin"))
for _, directory in ipairs({ "3.10", "3.11", "3.12", "3.13" }) do
    local packages = pathJoin(root, "lib", "python" .. directory, "site-packages")
    if isDir(packages) then
        prepend_path("PYTHONPATH", packages)
    end
end
setenv("HPCRAY_ROOT", root)
-- The site's settings (docs/how-to/site.md), where there are some beside the installation.
if isFile(pathJoin(root, "etc", "hpcray.toml")) then
    setenv("HPCRAY_CONFIG", pathJoin(root, "etc", "hpcray.toml"))
end
