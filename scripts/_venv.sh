# Sourced by the scripts beside it: makes .venv with the project and its `test` extra, which includes
# `torchtitan` and `plots`, and puts it first on PATH. Does nothing while .venv is up to date with
# pyproject.toml.
#
# PYTHON names the interpreter, 3.11 or later.

cd "$(dirname "${BASH_SOURCE[0]}")/.."

make_venv() {
    local python stamp candidate
    stamp="$(cksum pyproject.toml scripts/_venv.sh) $PWD"
    if [[ "$(cat .venv/stamp 2>/dev/null)" != "$stamp" ]]; then
        for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
            if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
                python="$candidate"
                break
            fi
        done
        if [[ -z "${python:-}" ]]; then
            echo "No Python 3.11 or later found: install one, or name it in PYTHON." >&2
            return 1
        fi
        echo "Making .venv with $("$python" --version) ..." >&2
        rm -rf .venv
        "$python" -m venv .venv
        .venv/bin/pip install --quiet --upgrade pip
        # The newest torch of the range is a CUDA build of several GB: of no use without a GPU.
        if ! command -v nvidia-smi >/dev/null; then
            .venv/bin/pip install --quiet torch==2.13.0
        fi
        .venv/bin/pip install --quiet --editable '.[test]'
        echo "$stamp" >.venv/stamp
    fi
    export PATH="$PWD/.venv/bin:$PATH"
}

make_venv
