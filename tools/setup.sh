#!/bin/sh
# Make .venv in the checkout from requirements/cpu.txt. Needs python3 with pip; everything else is installed by hash.
set -eu
cd "$(dirname "$0")/.."
stamp=.venv/.installed
wanted=$(cat requirements/cpu.txt requirements/uv.txt pyproject.toml tools/setup.sh | sha256sum)
[ "$(cat "$stamp" 2>/dev/null || true)" = "$wanted" ] && exit 0

# The stack needs Python 3.12. Where python3 is another version, look where 3.12 usually is; uv fetches one as the last resort.
python=3.12
for candidate in "${PYTHON:-}" python3.12 python3 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12*/bin/python3 /usr/local/bin/python3.12; do
    [ -n "$candidate" ] || continue
    if found=$("$candidate" -c 'import sys; print(sys.executable if sys.version_info[:2] == (3, 12) else "")' 2>/dev/null) && [ -n "$found" ]; then
        python=$found
        break
    fi
done

tools=$(mktemp -d)
trap 'rm -rf "$tools"' EXIT
python3 -m pip install --quiet --disable-pip-version-check --no-deps --only-binary=:all: --require-hashes --target "$tools" -r requirements/uv.txt
uv="$tools/bin/uv"
[ -x .venv/bin/python ] || "$uv" venv --quiet --python "$python" .venv
# Compiled once here: every engine and every rank is a process that imports vLLM, which takes twice as long from source.
"$uv" pip sync --quiet --compile-bytecode --python .venv/bin/python --require-hashes requirements/cpu.txt
"$uv" pip install --quiet --python .venv/bin/python --no-deps --no-build-isolation --editable .
echo "$wanted" > "$stamp"
