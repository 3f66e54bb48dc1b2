# Sourced by scripts/test and scripts/demo, which set $root: finds a Python that _setup.py can make .venv with.
# Plain POSIX sh, because nothing else can be taken for granted on a fresh machine.

# True for a Python 3.12 or newer that can make environments; some distributions leave out what that takes.
python_fits() {
    "$1" -c 'import sys; assert sys.version_info >= (3, 12); import ensurepip, ssl, venv' >/dev/null 2>&1
}

# Prints every place where a Python may be, best first: the newest tested minor version before newer ones.
python_places() {
    [ -z "${PYTHON:-}" ] || echo "$PYTHON"
    echo "$root/.venv/bin/python"
    for minor in 12 13 14; do
        command -v "python3.$minor" || :
        for folder in "${PYENV_ROOT:-$HOME/.pyenv}/versions/3.$minor".*/bin "$HOME/.local/share/uv/python/cpython-3.$minor".*/bin \
            /usr/local/bin /opt/homebrew/bin; do
            echo "$folder/python3.$minor"
        done
    done
    command -v python3 || :
    command -v python || :
}

find_python() {
    python_places | while IFS= read -r place; do
        if [ -x "$place" ] && python_fits "$place"; then
            printf '%s\n' "$place"
            break
        fi
    done
}

# Sets $python, or ends the script with how to get one.
require_python() {
    python=$(find_python)
    [ -n "$python" ] || {
        cat >&2 <<TEXT
No Python 3.12 or newer was found (looked for python3.12 to python3.14 and python3 on the PATH and among pyenv's and
uv's builds; one without the venv and ensurepip modules does not count). Here python3 is: $(python3 --version 2>&1 || echo none)
Get one with your system's packages (Debian 13 or Ubuntu 24.04: apt-get install python3 python3-venv; Fedora: dnf install
python3.12; macOS: brew install python@3.12) or with pyenv (pyenv install 3.12). For one in another place: PYTHON=/its/path.
TEXT
        exit 1
    }
}
