#!/usr/bin/env bash
# Makes .venv: the locked dependencies and this package, built from source. Quick when nothing has changed.
set -euo pipefail
cd "$(dirname "$0")/.."

fail() {
    echo "harbor-trl: $*" >&2
    exit 1
}

is_python() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1; }

# A name in PATH may be a shim of pyenv's that only says what it lacks, so each candidate is run.
find_python() {
    local candidate
    for candidate in ${PYTHON:-} python3.12 python3.13 python3.14 python3 python \
        "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[2-9]*/bin/python3; do
        if is_python "$candidate"; then
            "$candidate" -c 'import sys; print(sys.executable)'
            return
        fi
    done
    return 1
}

python=$(find_python) ||
    fail "Python 3.12 or newer is missing: install it (Debian: apt install python3 python3-venv; else: pyenv install 3.12)," \
        "or set PYTHON to one"

PATH=$PATH:$HOME/.cargo/bin
cargo --version >/dev/null 2>&1 || fail "Rust is missing: install 1.88 or newer, with rustup (rustup.rs)"
rust=$(rustc --version | awk '{ print $2 }')
[ "$(printf '1.88\n%s\n' "$rust" | sort -V | head -n 1)" = 1.88 ] || fail "Rust $rust is too old: run 'rustup update' for 1.88 or newer"
command -v cc >/dev/null || fail "a C compiler (the linker that Rust calls) is missing: install gcc or clang (Debian: apt install gcc)"

uv=
for candidate in uv "$(dirname "$python")/uv" .tools/uv/bin/uv; do
    if "$candidate" --version >/dev/null 2>&1; then
        uv=$candidate
        break
    fi
done
if [ -z "$uv" ]; then
    "$python" -m venv .tools/uv || fail "$python cannot make a virtual environment: install its venv module (Debian: apt install python3-venv)"
    .tools/uv/bin/python -m pip install --quiet 'uv>=0.9' || fail "uv, which installs the locked dependencies, could not be installed by pip"
    uv=.tools/uv/bin/uv
fi

unset VIRTUAL_ENV UV_PROJECT_ENVIRONMENT
# An environment that works keeps its Python.
if [ -x .venv/bin/python ] && is_python .venv/bin/python; then
    python=.venv/bin/python
fi
[ -x .venv/bin/python ] || echo "harbor-trl: installing the locked dependencies (some gigabytes) and building the package: some minutes" >&2
"$uv" sync --quiet --locked --no-python-downloads --python "$python" --extra dev --extra quickstart ||
    fail "the locked dependencies could not be installed, or the package not built (see above)"
