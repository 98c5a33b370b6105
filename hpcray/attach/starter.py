"""Finds a node of a job on this host, and becomes `hpcray bridge` there, with the Python of that job.

It is sent to the node as text, and runs with whatever Python 3 there is, so it needs nothing but the standard library:
neither hpcray nor the environment of the program that attaches counts on a compute node. Where there is no such node it
says so on standard output, as the bridge would.
"""

# mypy: allow-untyped-defs, allow-untyped-calls

import fcntl
import json
import os
import socket
import sys

MARK = "\x1ehpcray-bridge "


def main(job, session):
    """Become the bridge. job: Slurm's id; "" for any. session: a session directory that must be the one; "" for any."""
    host, final = socket.gethostname(), False
    try:
        found = [info for info in _sessions(job) if not session or info["path"] == session]
        names = sorted({info["session"] for info in found})
        if not found:
            final = bool(session)  # a node that has ended does not come again
            what = f"session {session}" if session else f"node of job {job}"
            raise LookupError(f"there is no live {what} on {host}; hint: does it run hpcray, and has it started?")
        if len(names) > 1:
            raise LookupError(f"job {job} runs several sessions: {', '.join(names)}; hint: a job for each")
        info = min(found, key=lambda one: one["node"])
        environ = _environment(info["pid"])
        python = info.get("python") or os.readlink(f"/proc/{info['pid']}/exe")
        root = info.get("root")
        code = "import sys; sys.path[0:1] = []; "
        if root:
            code += f"{root!r} in sys.path or sys.path.append({root!r}); "
        code += "from hpcray.cli.attach import serve_bridge; serve_bridge(sys.argv[1])"
        os.execve(python, [python, "-c", code, info["path"]], environ)
    except Exception as error:
        os.write(1, f"\n{MARK}{json.dumps({'error': str(error), 'final': final, 'host': host})}\n".encode())
        sys.exit(1)


def _environment(pid):
    """The variables of the node's own process, which is the same user's; but this step's name of the node."""
    with open(f"/proc/{pid}/environ", "rb") as file:
        pairs = (entry.partition(b"=") for entry in file.read().split(b"\0") if b"=" in entry)
        environ = {name: text for name, _, text in pairs}
    if "SLURMD_NODENAME" in os.environ:
        environ[b"SLURMD_NODENAME"] = os.environb[b"SLURMD_NODENAME"]
    return environ


def _sessions(job):
    found = []
    for root in sorted(_roots()):
        try:
            above = _open_own(root)
        except OSError:
            continue
        for name in os.listdir(above):
            try:
                here = _open_own(name, above)
            except OSError:
                continue
            try:
                if not _is_live(here):
                    continue
                with open(_open_own("info.json", here, os.O_RDONLY), "rb") as file:
                    info = json.loads(file.read().decode())
            except (OSError, ValueError):
                continue
            finally:
                os.close(here)
            mine = info.get("host") == socket.gethostname() and not info.get("relayed")
            if mine and (not job or info.get("slurm_job") == job):
                found.append(info)
        os.close(above)
    return found


def _roots():
    """Where nodes of this user may have their sessions: what each of this user's processes has in its environment."""
    name = f"hpcray-{os.getuid()}"
    places = {"/tmp"}
    for pid in [entry for entry in os.listdir("/proc") if entry.isdigit()]:
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                environ = dict(entry.split(b"=", 1) for entry in file.read().split(b"\0") if b"=" in entry)
        except OSError:
            continue
        for variable in (b"HPCRAY_TMPDIR", b"SLURM_TMPDIR", b"TMPDIR"):
            if environ.get(variable):
                places.add(os.path.abspath(os.fsdecode(environ[variable])))
    home = os.path.join(os.path.expanduser("~"), ".hpcray", "tmp", socket.gethostname().split(".")[0])
    return {os.path.join(place, name) for place in places | {home}}


def _open_own(name, above=None, flags=os.O_RDONLY | os.O_DIRECTORY):
    """Open what is this user's alone: the owner of a directory above could exchange it between a look and a use."""
    fd = os.open(name, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=above)
    state = os.fstat(fd)
    if state.st_uid != os.getuid() or state.st_mode & 0o077:
        os.close(fd)
        raise OSError(f"{name} is not this user's alone")
    return fd


def _is_live(session):
    """True while the node's process holds its lock."""
    fd = _open_own("lock", session, os.O_RDWR)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except OSError:
        return True
    finally:
        os.close(fd)


if __name__ == "__main__":
    main(*sys.argv[1:3])
