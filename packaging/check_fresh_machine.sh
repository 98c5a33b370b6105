#!/usr/bin/env bash
# Install hpcray on fresh Debian machines and run examples/digits.py there with hpcray-launch, as an ordinary user.
#
#     packaging/check_fresh_machine.sh [-s suite] [-w wheel] [case ...]
#
#   wheel     nothing but Python; MPI and UCX come from PyPI: pip install 'hpcray[all,examples]'
#   openmpi   the site's MPI alone: Debian's Open MPI, mpi4py built for it, pip install 'hpcray[examples]'
#   mpich     the same with Debian's MPICH
#   openmpi-packaged   Debian's Open MPI with Debian's own mpi4py
#   readme    the two commands of README.md's quick start, in a copy of this checkout: the job, and the tests (an hour)
#
# Default: the first three, on bookworm (Python 3.11), with a wheel built from this checkout. trixie has Python 3.13, testing 3.14.
# Needs root, mmdebstrap (apt-get install mmdebstrap), Debian's packages and PyPI. A machine is a directory of its own
# with namespaces of its own for mounts and processes; nothing of it is left.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
suite=bookworm
wheel=
while getopts s:w: option; do
    case $option in
        s) suite=$OPTARG ;;
        w) wheel=$OPTARG ;;
        *) exit 2 ;;
    esac
done
shift $((OPTIND - 1))
cases=("$@")
[ ${#cases[@]} -gt 0 ] || cases=(wheel openmpi mpich)
for name in "${cases[@]}"; do
    case $name in
        wheel | openmpi | mpich | openmpi-packaged | readme) ;;
        *) echo "no case $name; hint: wheel, openmpi, mpich, openmpi-packaged, readme" >&2; exit 2 ;;
    esac
done
[ "$(id -u)" = 0 ] || { echo "needs root: it makes and enters a directory with a Debian of its own" >&2; exit 2; }
command -v mmdebstrap >/dev/null || { echo "no mmdebstrap; hint: apt-get install mmdebstrap" >&2; exit 2; }

work=$(mktemp -d "${TMPDIR:-/tmp}/hpcray-fresh.XXXXXX")
trap 'rm -rf "$work"' EXIT
chmod 755 "$work"

if [ -z "$wheel" ]; then
    python3 -m pip wheel --quiet --no-deps --wheel-dir "$work" "$root"
    wheel=$(echo "$work"/hpcray-*.whl)
fi
echo "== $(basename "$wheel") on $suite"

# This machine's own mirror, also where it is not deb.debian.org.
mirror=$(grep -rhoE '^URIs: \S+debian/?$|^deb (\[[^]]*\] )?\S+debian/? ' /etc/apt/sources.list /etc/apt/sources.list.d 2>/dev/null |
    grep -oE '[a-z]+://\S+' | head -n 1 || true)
# A mirror may be a snapshot, whose lists have expired.
mmdebstrap --quiet --mode=root --aptopt='Acquire::Check-Valid-Until "false"' --variant=minbase \
    --include=ca-certificates,python3,python3-venv "$suite" \
    "$work/base.tar" "${mirror:-http://deb.debian.org/debian}"

in_machine() { # MACHINE USER COMMAND...: in namespaces of its own, which end with the command
    local machine=$1 user=$2
    shift 2
    unshare --mount --pid --fork --kill-child --uts --ipc bash -euc '
        machine=$1 user=$2
        shift 2
        hostname fresh
        mount -t proc proc "$machine/proc"
        mount --bind /sys "$machine/sys"
        mount -t tmpfs -o mode=1777,size=1g shm "$machine/dev/shm"
        mkdir -p "$machine/dev/pts"
        mount -t devpts -o newinstance,ptmxmode=0666,mode=620,gid=5 pts "$machine/dev/pts"
        ln -sf pts/ptmx "$machine/dev/ptmx"
        # A shell that starts this in the background lets it ignore SIGINT.
        exec env --default-signal=INT,QUIT chroot --userspec="$user:$user" "$machine" env -i HOME="$(chroot "$machine" sh -c "echo ~$user")" LANG=C.UTF-8 \
            PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin DEBIAN_FRONTEND=noninteractive \
            PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore PIP_DEFAULT_TIMEOUT=180 \
            ${PIP_INDEX_URL:+PIP_INDEX_URL="$PIP_INDEX_URL"} ${PIP_CERT:+PIP_CERT=/etc/ssl/certs/ca-certificates.crt} "$@"
    ' machine "$machine" "$user" "$@"
}

make_machine() { # MACHINE: a Debian, with a user
    local machine=$1
    mkdir -p "$machine"
    tar -xf "$work/base.tar" -C "$machine"
    cp /etc/resolv.conf "$machine/etc/resolv.conf"
    printf '127.0.0.1 localhost fresh\n' >"$machine/etc/hosts"
    [ -z "${PIP_CERT:-}" ] || cp "$PIP_CERT" "$machine/etc/ssl/certs/ca-certificates.crt"
    mkdir -p "$machine/dev/shm"
    chroot "$machine" useradd --create-home ada
}

check_left() { # NAME MACHINE: nothing may be left of a job
    local left
    left=$(in_machine "$2" ada sh -c 'ls -d /tmp/hpcray-* 2>/dev/null || true')
    [ -z "$left" ] || { echo "$1 left $left" >&2; return 1; }
}

check_readme() { # what the quick start promises: no MPI, no UCX, no compiler, no root
    local machine=$work/readme job tests
    job=$(grep -m 1 '^python3 -m venv .venv && ' "$root/README.md")
    tests=$(grep -m 1 '^\.venv/bin/pytest' "$root/README.md")
    make_machine "$machine"
    mkdir "$machine/home/ada/hpcray"
    git -C "$root" ls-files -z | tar -C "$root" --null --files-from=- -c | tar -C "$machine/home/ada/hpcray" -x
    chroot "$machine" chown -R ada: /home/ada/hpcray
    echo "\$ $job"
    in_machine "$machine" ada sh -c "cd ~/hpcray && $job" | tee "$work/readme.out"
    grep -q 'node 3' "$work/readme.out" || { echo "readme: no fourth node worked" >&2; return 1; }
    echo "\$ $tests"
    in_machine "$machine" ada sh -c "cd ~/hpcray && $tests"
    check_left readme "$machine"
    rm -rf "$machine"
}

check() {
    local name=$1 machine=$work/$1 packages=() extras=examples options=()
    make_machine "$machine"
    cp "$wheel" "$root/examples/digits.py" "$machine/home/ada/"

    case $name in
        wheel) extras=all,examples ;;
        openmpi) packages=(openmpi-bin libopenmpi-dev) ;;
        mpich) packages=(mpich libmpich-dev) ;;
        openmpi-packaged) packages=(openmpi-bin python3-mpi4py) ;;
    esac
    if [ ${#packages[@]} -gt 0 ]; then
        [ "$name" = openmpi-packaged ] || packages+=(gcc libc6-dev python3-dev)
        in_machine "$machine" root sh -c 'apt-get update -qq && apt-get install -y -qq --no-install-recommends "$@" >/dev/null' \
            install "${packages[@]}"
    fi
    [ "$name" != openmpi-packaged ] || options=(--system-site-packages)
    in_machine "$machine" ada python3 -m venv "${options[@]}" /home/ada/env
    case $name in
        openmpi | mpich) in_machine "$machine" ada env CFLAGS=-O0 /home/ada/env/bin/pip install --quiet --no-binary mpi4py 'mpi4py>=4' ;; # compiles in a fifth of the time
    esac
    in_machine "$machine" ada sh -c "cd && env/bin/pip install --quiet './$(basename "$wheel")[$extras]'"
    if [ "$name" != wheel ] && in_machine "$machine" ada /home/ada/env/bin/pip show --quiet openmpi 2>/dev/null; then
        echo "$name: PyPI's Open MPI was installed beside the site's" >&2
        return 1
    fi
    in_machine "$machine" ada sh -c 'cd && env/bin/hpcray doctor' || true # its rows tell what a failure below comes from
    # Not the first process of its namespace: as that, timeout of coreutils 9.10 ends at once.
    in_machine "$machine" ada sh -c 'cd && timeout 300 env/bin/hpcray-launch -n 2 digits.py; exit $?' | tee "$work/$name.out"
    check_left "$name" "$machine"
    grep -q 'node 1' "$work/$name.out" || { echo "$name: no second node worked" >&2; return 1; }
    rm -rf "$machine"
}

failed=()
for name in "${cases[@]}"; do
    echo "== $suite, $name"
    # A subshell of its own with -e: `check || …` would switch -e off inside.
    function=check
    [ "$name" != readme ] || function=check_readme
    if (set +e; (set -e; "$function" "$name"); exit $?); then :; else failed+=("$name"); fi
done
if [ ${#failed[@]} -gt 0 ]; then
    echo "failed on $suite: ${failed[*]}" >&2
    exit 1
fi
echo "passed on $suite: ${cases[*]}"
